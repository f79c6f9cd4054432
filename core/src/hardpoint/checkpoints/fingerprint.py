"""What the files of a model are, told briefly, for hosts and ranks that must have the same.

A small file tells by a digest of all its bytes. Of a large one the size counts, its first and last
block, and some between at equal distances: the header of tensors, of which a few megabytes are read
however large the model is. Two checkpoints that differ in some weights alone differ in nearly every
block; a single byte that is another may go unseen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hardpoint.checkpoints.files import open_regular
from hardpoint.checkpoints.identification import DUMMY
from hardpoint.errors import CheckpointError

SMALL: Final = 1 << 20
"""Bytes of a file that is read whole."""
BLOCK: Final = 1 << 16
BLOCKS: Final = 16
"""How many blocks of a larger one are read, first and last included."""
MOST: Final = 1000
"""Files that are told of one by one; further ones together."""
SUFFIXES: Final = frozenset({".safetensors", ".json", ".gguf", ".model", ".txt", ".jinja"})
"""What of a folder counts."""

MISSING: Final = "missing"
OTHERS: Final = "all other files"


def fingerprint(path: Path, model_format: str) -> dict[str, str]:
    """Return name -> size and digest of each file of the model at ``path``, as its description has
    it; nothing where weights are made up (``dummy``). Raises CheckpointError.
    """
    if model_format == DUMMY:
        return {}
    if not path.is_dir():
        return {path.name: _file(path)}
    try:
        names = sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed: {error.strerror}") from error
    found = {name: _file(path / name) for name in names}
    if len(found) > MOST:
        rest = {name: found.pop(name) for name in names[MOST:]}
        found[OTHERS] = hashlib.sha256(repr(rest).encode()).hexdigest()[:16]
    return found


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first file that differs, and what it is here and there; None if all are alike."""
    for name in dict.fromkeys((*ours, *theirs)):
        here, there = ours.get(name, MISSING), theirs.get(name, MISSING)
        if here != there:
            return name, here, there
    return None


def _file(path: Path) -> str:
    state = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SMALL:
            state.update(file.read(size) or b"")
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                state.update(file.read(BLOCK) or b"")
    return f"{size} bytes, {state.hexdigest()[:16]}"
