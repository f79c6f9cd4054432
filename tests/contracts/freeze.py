"""Writes down the contracts under their number, ``NUMBER.json`` beside this file.

    python tests/contracts/freeze.py

Additions are recorded; what would break a plugin is told, and then nothing is written. A new number
in ``hardpoint.API`` freezes all anew: a minor one takes the additions in, a major one may break and
needs the page ``docs/migrating-to-MAJOR.md``. The older files stay: they are what the plugins that
are still served were built for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from compare import Comparison, compared
from describe import Lines, described, number
from promises import PROMISES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WAYS_OUT = """
These contracts are frozen: plugins that were built for {number} would break. Two ways out:
  1. Undo it: keep what was there, and add beside it (a default, another name, a deprecation:
     docs/versions.md).
  2. If it must be: raise the number in hardpoint.API to ({next}, 0), write what an author has to
     change into docs/migrating-to-{next}.md, add a changes/*.contract.md, and run
     python tests/contracts/freeze.py
"""
RECORD = """
They are additions, which no plugin is broken by. Record them, with a changes/*.contract.md:
    python tests/contracts/freeze.py
The release that has them first carries the next minor number in hardpoint.API.
"""

OTHER = """
The promise {name!r} is frozen under its number: what was built on it would break. Undo it and add
beside it, or raise the number (docs/versions.md), add a changes/*.contract.md and run
    python tests/contracts/freeze.py
"""


class Broken(Exception):  # noqa: N818 - the sentence is the name
    """Contracts that are frozen were changed. The message has what, and the ways out."""


def file_of(name: str) -> Path:
    """Return where the contracts of a number are."""
    return HERE / f"{name}.json"


def read(name: str) -> dict[str, Any]:
    """Return the document of a number."""
    document: dict[str, Any] = json.loads(file_of(name).read_text())
    return document


def since(name: str, now: Lines) -> Comparison:
    """Compare the code with what is frozen under ``name``; raise Broken with the ways out."""
    comparison = compared(read(name)["contracts"], now, name)
    if comparison.breaks:
        ways = WAYS_OUT.format(number=name, next=int(name.partition(".")[0]) + 1)
        raise Broken("\n".join(comparison.breaks) + "\n" + ways)
    return comparison


def of_major(major: str) -> list[str]:
    """Return the numbers of a major one that are frozen, in order."""
    names = [path.stem for path in HERE.glob(f"{major}.*.json")]
    return sorted(names, key=lambda name: int(name.partition(".")[2]))


def promised(name: str) -> Comparison:
    """Compare one of the other promises with what is frozen under its number; raise Broken."""
    promise = PROMISES[name]
    comparison = compared(read(f"{name}-{promise.number()}"), promise.described(), promise.number())
    if comparison.breaks:
        raise Broken("\n".join(comparison.breaks) + "\n" + OTHER.format(name=name))
    return comparison


def freeze_promise(name: str) -> str:
    """Write what one of the other promises is now, if it breaks nothing that has its number."""
    promise = PROMISES[name]
    path = file_of(f"{name}-{promise.number()}")
    if path.exists():
        promised(name)
    else:
        path.write_text(json.dumps(promise.described(), indent=1, sort_keys=True) + "\n")
    return f"{path.name}: {len(read(path.stem))} lines"


def freeze() -> str:
    """Write the document of the code's number; return what was done, as a sentence."""
    name, now = number(), described()
    major = name.partition(".")[0]
    added: Lines = {}
    for older in of_major(major):
        added = since(older, now).added
    if name not in of_major(major):
        page = ROOT / "docs" / f"migrating-to-{major}.md"
        if of_major(str(int(major) - 1)) and not of_major(major) and not page.exists():
            raise Broken(f"docs/{page.name} is not there: say what an author has to change")
        contracts, added = now, {}
    else:
        contracts = read(name)["contracts"]
    document = {"number": name, "contracts": contracts, "added": dict(sorted(added.items()))}
    file_of(name).write_text(json.dumps(document, indent=1) + "\n")
    return f"{file_of(name).name}: {len(contracts)} lines, and {len(added)} added since"


if __name__ == "__main__":
    try:
        print(freeze())
        print(*map(freeze_promise, PROMISES), sep="\n")
    except Broken as broken:
        sys.exit(str(broken))
