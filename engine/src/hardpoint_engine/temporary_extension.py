"""An extension for the time being: found by metadata in a folder of its own, installed nowhere."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Self


class TemporaryExtension:
    """Makes module ``module`` an extension ``name`` that is found in this process and its workers.
    Closed, it is found no more.
    """

    def __init__(self, name: str, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"hardpoint-{name}-")
        info = Path(self._folder.name) / f"hardpoint_{name}_methods-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: hardpoint-{name}-methods\nVersion: 1\n"
        )
        (info / "entry_points.txt").write_text(f"[hardpoint.extensions]\n{name} = {module}\n")
        sys.path.append(self._folder.name)

    def close(self) -> None:
        """Remove it."""
        sys.path.remove(self._folder.name)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
