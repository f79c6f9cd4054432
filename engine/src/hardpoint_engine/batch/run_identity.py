"""What a run computes with, told from what another run did: results of two do not mix in one file.

Driver side. Hardware, limits and the window are no part of it: a run may go on elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import fields
from hardpoint.config import Config
from hardpoint.sampling_params import SamplingParams

PARTS = (
    "model (--model, --tokenizer, --dtype, --load-format, logits processors)",
    "sampling parameters or seed",
    "system message or chat template (--system, --chat-template, --raw)",
)
"""What each part of an identity stands for, for people."""
_SAMPLE = 1 << 16
_READ = (".gguf", ".safetensors", ".json", ".jinja", ".model")


def run_identity(
    config: Config, sampling: SamplingParams, conversation: Mapping[str, Any] | None
) -> str:
    """Return a digest for each of ``PARTS``, joined by dashes. ``config`` names its model.

    Of a model's files the name, the size and samples count, not the place: it may be moved.
    """
    model = config.model
    weights = [_files(path) for path in (model.model, model.tokenizer)]
    processors = [str(each) for each in config.sampling.logits_processors]
    own = {
        attribute.name: repr(value)
        for attribute in fields(SamplingParams)
        if (value := getattr(sampling, attribute.name)) != attribute.default
    }
    parts = (
        [weights, model.dtype, config.load.load_format, processors],
        [own, model.seed],
        conversation,
    )
    return "-".join(_digest(json.dumps(part, sort_keys=True).encode()) for part in parts)


def differing(one: str, other: str) -> str:
    """Say which parts of two identities differ."""
    pairs = zip(PARTS, one.split("-"), other.split("-"), strict=False)
    return " and ".join(about for about, a, b in pairs if a != b) or "kind of run"


def _files(path: str | None) -> list[list[Any]] | str | None:
    if path is None:
        return None
    place = Path(path).expanduser()
    try:
        found = [place] if place.is_file() else sorted(place.iterdir())
        return [
            [file.name, file.stat().st_size, _sampled(file)]
            for file in found
            if file.suffix in _READ and file.is_file()
        ]
    except OSError:
        return path  # whoever loads it says what is wrong with it


def _sampled(file: Path) -> str:
    """Return the digest of the beginning, the middle and the end."""
    size = file.stat().st_size
    with file.open("rb") as data:
        found = b""
        for start in (0, size // 2, max(0, size - _SAMPLE)):
            data.seek(start)
            found += data.read(_SAMPLE)
    return _digest(found)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
