"""The ``hardpoint`` command as ``python -m hardpoint``: that of the interpreter named."""

from __future__ import annotations

from hardpoint.cli import main

if __name__ == "__main__":
    main()
