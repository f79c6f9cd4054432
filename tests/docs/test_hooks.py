"""Every hook has its line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text()
SOURCE = ROOT / "core" / "src" / "hardpoint" / "hookspecs.py"


def test_every_hook_is_listed_in_order():
    nodes = ast.parse(SOURCE.read_text()).body
    hooks = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    assert re.findall(r"^\| `(hardpoint_\w+)` \|", PAGE, re.MULTILINE) == hooks
