"""A model as its ranks hold it: one folder, every rank's own tensors in files of its own, and a
manifest that says what belongs together.

Nothing in the folder counts that the manifest does not name, and without a manifest there is no
sharded state. A save that was decided and then cut off has left files in the folder COMMITTED
(:mod:`hardpoint.checkpoints.saving`): they are the state's as if they were in their places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from hardpoint import API, __version__
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.checkpoints.documents import read_object
from hardpoint.checkpoints.fields import Fields
from hardpoint.checkpoints.files import contained
from hardpoint.checkpoints.folder_description import LLAMA, from_configuration
from hardpoint.checkpoints.tables import FLOAT_TYPES, shown, some
from hardpoint.errors import CheckpointError
from hardpoint.records import SavedFile, SavedTensor, Version

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.config.schema import ParallelConfig
    from hardpoint.metadata import Plugin

MANIFEST: Final = "sharded_state.json"
COMMITTED: Final = ".committed"
"""Holds, of a save that was decided, what is not in its place yet; the manifest leaves it last."""
SHARDED_STATE: Final = "sharded_state"
"""The load format, and the format of such a description."""
FORMAT: Final = 1
"""The number of the manifest's own format."""
MOST_RANKS: Final = 65_536

_DIGEST = re.compile(r"[0-9a-f]{64}")


@frozen(kw_only=True)
class Manifest:
    """What was saved. ``files[rank]`` are those of a worker. ``config`` is the model's, as in a
    config.json. ``api`` and ``version`` are the contract number and the release that wrote it,
    ``plugins`` the platform and the extensions that took part, each with its own numbers.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    dtype: str
    config: Mapping[str, Any]
    files: tuple[tuple[SavedFile, ...], ...]
    api: Version
    version: str
    plugins: tuple[str, ...] = ()

    def differs(self, parallel: ParallelConfig, num_workers: int) -> tuple[str, int] | None:
        """Return the first key whose value is not what was saved, and what was; None if all are.

        Where one worker saved and one loads, tensors are whole, however many devices it has.
        """
        if num_workers == len(self.files) == 1:
            return None
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            saved: int = getattr(self, key)
            if getattr(parallel, key) != saved:
                return key, saved
        return None

    def document(self) -> dict[str, Any]:
        """Return it as it is written."""
        return {
            "format": FORMAT,
            "hardpoint": self.version,
            "api": list(self.api),
            "plugins": list(self.plugins),
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "dtype": self.dtype,
            "config": dict(self.config),
            "ranks": [[_file_document(file) for file in files] for files in self.files],
        }


def _file_document(file: SavedFile) -> dict[str, Any]:
    tensors = {each.name: [each.dtype, list(each.shape)] for each in file.tensors}
    return {
        "name": file.name,
        "sha256": file.sha256,
        "num_bytes": file.num_bytes,
        "tensors": tensors,
    }


def configuration_of(description: ModelDescription) -> dict[str, Any]:
    """Return the config.json that describes the same model, whatever it was read from."""
    return {
        **description.hf_config,
        "architectures": [description.architecture],
        "hidden_size": description.hidden_size,
        "intermediate_size": description.intermediate_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_size,
        "vocab_size": description.vocab_size,
        "max_position_embeddings": description.context_length,
        "bos_token_id": description.bos_token_id,
        "eos_token_id": list(description.eos_token_ids) or None,
    }


def manifest_of(
    config: Config, files: Sequence[Sequence[SavedFile]], plugins: Iterable[Plugin] = ()
) -> Manifest:
    """Return the manifest of what the ranks of ``config`` wrote, ``files[rank]`` each, with
    ``plugins`` in use.
    """
    return Manifest(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        dtype=config.model.dtype,
        config={} if config.description is None else configuration_of(config.description),
        files=tuple(tuple(each) for each in files),
        api=API,
        version=__version__,
        plugins=tuple(
            f"{plugin.kind} {plugin.name}: {plugin.provider}, API "
            + ".".join(map(str, getattr(plugin.record, "api", ())))
            for plugin in plugins
        ),
    )


def located(folder: Path, name: str) -> Path:
    """Return where a file of the state in ``folder`` is. Raises CheckpointError if that is outside
    of the folder.
    """
    waiting = contained(folder, f"{COMMITTED}/{name}")
    return waiting if waiting.exists() else contained(folder, name)


def has_manifest(folder: Path) -> bool:
    """Whether a sharded state is in ``folder``."""
    return located(folder, MANIFEST).exists()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of ``folder``. Raises CheckpointError, naming the key, for anything that
    does not add up, and if there is none.
    """
    path = located(folder, MANIFEST)
    if not path.exists():
        raise CheckpointError(
            f"{folder}: there is no {MANIFEST} in the folder: no sharded state was saved there, or "
            "saving it was not finished; save it again"
        )
    return manifest_in(path)


def manifest_in(path: Path) -> Manifest:
    """Read the manifest that is the file ``path``; raises as :func:`read_manifest`."""
    fields = Fields(path, read_object(path))
    if fields.integer("format") != FORMAT:
        raise fields.fail("format", fields.values["format"], f"{FORMAT}, the one known here")
    api = fields.values.get("api")
    if not isinstance(api, list) or len(api) != 2 or any(type(part) is not int for part in api):
        raise fields.fail("api", api, "two whole numbers")
    dtype = fields.text("dtype")
    if dtype is None or dtype not in FLOAT_TYPES.values():
        raise fields.fail("dtype", dtype, f"one of {', '.join(FLOAT_TYPES.values())}")
    return Manifest(
        tensor_parallel_size=fields.integer("tensor_parallel_size", high=MOST_RANKS),
        pipeline_parallel_size=fields.integer("pipeline_parallel_size", high=MOST_RANKS),
        dtype=dtype,
        config=fields.table("config") or {},
        files=_files(fields),
        api=(api[0], api[1]),
        version=fields.text("hardpoint") or "",
        plugins=_texts(fields, "plugins"),
    )


def _texts(fields: Fields, key: str) -> tuple[str, ...]:
    values = fields.values.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.fail(key, values, "a list of strings")
    return tuple(values)


def _files(fields: Fields) -> tuple[tuple[SavedFile, ...], ...]:
    ranks = fields.values.get("ranks")
    if not isinstance(ranks, list) or not 0 < len(ranks) <= MOST_RANKS:
        raise fields.fail("ranks", ranks, "a list of each rank's files")
    files = []
    for rank, rows in enumerate(ranks):
        if not isinstance(rows, list):
            raise fields.fail(f"ranks[{rank}]", rows, "a list of files")
        files.append(tuple(_file(fields, row) for row in rows))
        _refuse_twins(fields, f"rank {rank}", [t.name for file in files[-1] for t in file.tensors])
    _refuse_twins(fields, "the folder", [file.name for rank in files for file in rank])
    return tuple(files)


def _file(fields: Fields, row: Any) -> SavedFile:
    if not isinstance(row, dict):
        raise fields.fail("ranks", row, "lists of tables")
    inner = Fields(fields.path, row)
    name, digest = inner.text("name") or "", inner.text("sha256") or ""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise inner.fail("name", name, "a file name, without folders")
    if not _DIGEST.fullmatch(digest):
        raise inner.fail("sha256", digest, "64 hexadecimal digits")
    return SavedFile(
        name=name,
        sha256=digest,
        num_bytes=inner.integer("num_bytes", low=0, high=1 << 62),
        tensors=tuple(_tensor(inner, *item) for item in (inner.table("tensors") or {}).items()),
    )


def _tensor(fields: Fields, name: str, row: Any) -> SavedTensor:
    if (
        not isinstance(row, list)
        or len(row) != 2
        or row[0] not in FLOAT_TYPES.values()
        or not isinstance(row[1], list)
        or any(type(size) is not int or not 0 <= size < 1 << 48 for size in row[1])
    ):
        raise fields.fail(f"tensors[{shown(name)}]", row, "a dtype and a list of sizes")
    return SavedTensor(name=name, dtype=row[0], shape=tuple(row[1]))


def _refuse_twins(fields: Fields, where: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twins = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{fields.path}: {where} has {some(twins)} twice")


def describe_sharded_state(folder: Path) -> ModelDescription:
    """Describe the model whose ranks' tensors are in ``folder``; called in the driver.

    Raises CheckpointError if a file is missing or has another size than the manifest says, naming
    what it held, or if the files do not hold what the configuration needs.
    """
    manifest = read_manifest(folder)
    check_files(folder, [file for files in manifest.files for file in files])
    fields = Fields(located(folder, MANIFEST), manifest.config)
    description = from_configuration(folder, fields, manifest.dtype)
    _check_amount(folder, description, manifest)
    return evolve(description, format=SHARDED_STATE)


def check_files(folder: Path, files: Iterable[SavedFile]) -> None:
    """Raise CheckpointError, naming file and tensors, unless each is there in its full size."""
    for file in files:
        path = located(folder, file.name)
        held = some([tensor.name for tensor in file.tensors]) or "nothing"
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path}: a part of the sharded state is missing ({error.strerror}); it holds "
                f"{held}"
            ) from error
        if size != file.num_bytes:
            raise CheckpointError(
                f"{path}: the part has {size} bytes where {MANIFEST} says {file.num_bytes}; it "
                f"holds {held}; save the state again"
            )


def _check_amount(folder: Path, description: ModelDescription, manifest: Manifest) -> None:
    """Refuse a configuration that the files belie, before anything of its size is allocated."""
    held: dict[str, int] = {}
    for files in manifest.files:
        for file in files:
            for tensor in file.tensors:
                held[tensor.name] = held.get(tensor.name, 0) + math.prod(tensor.shape)
    if description.architecture == LLAMA:
        needed = {name: math.prod(shape) for name, shape in expected_shapes(description).items()}
        if missing := [name for name in needed if held.get(name, 0) < needed[name]]:
            raise CheckpointError(
                f"{folder}: the ranks' parts of {len(missing)} tensors are less than the whole: "
                f"{some(missing)}"
            )
    elif sum(held.values()) < description.hidden_size * description.vocab_size:
        raise CheckpointError(
            f"{folder}: the parts hold {sum(held.values())} elements, fewer than the embedding of "
            f"{shown(description.architecture)} alone: they do not belong together"
        )
