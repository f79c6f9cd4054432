"""The ``hardpoint`` command as ``python -m hardpoint``: of this interpreter, whatever is on PATH."""

from __future__ import annotations

from hardpoint.cli import main

if __name__ == "__main__":
    main()
