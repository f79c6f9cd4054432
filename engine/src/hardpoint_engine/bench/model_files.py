"""The same weights in every format: made for ``hardpoint bench cpu`` from one GGUF file.

All are made of the numbers that the given file has, unpacked to float32: GGUF files of one type of
matrices each, and a folder of bfloat16 safetensors with the tokenizer. Needs the ``gguf`` package.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.identification import read_description
from hardpoint.checkpoints.safetensors_writer import FileTable
from hardpoint.checkpoints.unpacking import READ_TYPES
from hardpoint.checkpoints.weight_tables import StoredWeight, gguf_weights
from hardpoint.errors import UnsupportedError
from hardpoint.records import SavedTensor

from hardpoint_engine.text.tokenizer_gguf import read_gguf_tokenizer

GGUF_TYPES: Final = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
FOLDER: Final = "bf16"
TOKENIZER_SETTINGS: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
SKIPPED_KEYS: Final = ("GGUF.", "general.architecture", "general.file_type")


class ModelFiles:
    """Makes files of the model of the GGUF file ``source`` in ``folder``, each once.

    Raises UnsupportedError if the package gguf is missing, or cannot pack a type.
    """

    def __init__(self, source: Path, folder: Path, tell: Callable[[str], None]) -> None:
        try:
            self._gguf: Any = importlib.import_module("gguf")
            self._numpy: Any = importlib.import_module("numpy")
        except ImportError as error:
            raise UnsupportedError(
                "files of other formats",
                "this installation",
                reason=f"{error}",
                hint='Install what makes them: pip install "hardpoint-engine[bench]"',
            ) from None
        self.source = source
        self._folder = folder
        self._tell = tell
        folder.mkdir(parents=True, exist_ok=True)

    def gguf(self, kind: str) -> Path:
        """Return the GGUF file whose matrices are of the type ``kind``."""
        path = self._folder / f"model.{kind}.gguf"
        if not path.exists():
            self._tell(f"making {path}")
            part = path.with_suffix(".part")
            self._write_gguf(part, self._gguf.GGMLQuantizationType[kind])
            part.replace(path)
        return path

    def safetensors(self) -> Path:
        """Return the folder of bfloat16 weights, under the names of Hugging Face models."""
        folder = self._folder / FOLDER
        if not (folder / "config.json").exists():
            self._tell(f"making {folder}")
            folder.mkdir(exist_ok=True)
            description = read_description(self.source)
            self._write_safetensors(folder / "model.safetensors", description)
            read_gguf_tokenizer(self.source).save(folder / "tokenizer.json")
            _write(folder / "tokenizer_config.json", TOKENIZER_SETTINGS)
            _write(folder / "config.json", _settings(description))
        return folder

    def _write_gguf(self, path: Path, kind: Any) -> None:
        gguf = self._gguf
        reader = gguf.GGUFReader(str(self.source))
        architecture = reader.get_field("general.architecture").contents()
        writer = gguf.GGUFWriter(str(path), architecture)
        for field in reader.fields.values():
            if not field.name.startswith(SKIPPED_KEYS):
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        for tensor in reader.tensors:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
            numbers = numbers.reshape([int(size) for size in tensor.shape[::-1]])
            kept = kind if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
            data = tensor.data if tensor.tensor_type == kept else self._packed(numbers, kept)
            writer.add_tensor(tensor.name, data, raw_dtype=kept)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _packed(self, numbers: Any, kind: Any) -> Any:
        try:
            return self._gguf.quantize(numbers, kind)
        except (NotImplementedError, ValueError, self._gguf.QuantError) as error:
            raise UnsupportedError(
                f"{kind.name} of {list(numbers.shape)}",
                "the package gguf",
                reason=str(error) or type(error).__name__,
                hint="Leave the format out, or give a file of it as the model.",
            ) from None

    def _write_safetensors(self, path: Path, description: ModelDescription) -> None:
        with GGUFFile(self.source) as file, path.open("wb") as out:
            stored = gguf_weights(file, description, READ_TYPES)
            table = FileTable(metadata={"format": "pt"})
            for name, each in stored.items():
                table.add(SavedTensor(name=name, dtype="bfloat16", shape=each.entry.shape))
            out.write(table.header())
            for each in stored.values():
                out.write(self._narrowed(file, each))

    def _narrowed(self, file: GGUFFile, stored: StoredWeight) -> bytes:
        """Return a weight's numbers as bfloat16, rounded to the nearest, in the rows' order of
        Hugging Face models.
        """
        numpy, entry = self._numpy, stored.entry
        kind = self._gguf.GGMLQuantizationType[entry.type]
        raw = numpy.empty(entry.num_bytes, numpy.uint8)
        file.read_part(entry, raw.data)
        numbers = self._gguf.dequantize(raw.reshape(entry.shape[0], -1), kind)
        numbers = numbers.reshape(entry.shape).astype(numpy.float32)
        if stored.rotary_heads is not None:
            pairs = numbers.reshape(stored.rotary_heads, -1, 2, *entry.shape[1:])
            numbers = pairs.swapaxes(1, 2).reshape(entry.shape)
        if stored.less_one:
            numbers = numbers - 1
        bits = numpy.ascontiguousarray(numbers).view(numpy.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow: bytes = rounded.astype(numpy.uint16).tobytes()
        return narrow


def _settings(description: ModelDescription) -> dict[str, Any]:
    """Return the config.json."""
    return {
        **description.hf_config,
        "architectures": [description.architecture],
        "torch_dtype": "bfloat16",
        "bos_token_id": description.bos_token_id,
        "eos_token_id": list(description.eos_token_ids),
    }


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, default=_plain), encoding="utf-8")


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else list(value)
