"""What the page on configuration says beside the table of keys, which is generated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from hardpoint.config.loading import CONFIG_VARIABLE, DISABLE_VARIABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_variables_are_named_as_they_are_read():
    text = PAGE.read_text()
    assert CONFIG_VARIABLE in text
    assert DISABLE_VARIABLE in text
    assert "HARDPOINT_PLUGINS__CPU__THREADS" in text


def keys_of(document: object) -> set[str]:
    if isinstance(document, list):
        return set().union(*map(keys_of, document))
    if isinstance(document, dict):
        return set(document).union(*map(keys_of, document.values()))
    return set()


def test_the_document_is_described_key_by_key():
    command = [Path(sys.executable).parent / "hardpoint", "generate", "--platform", "dummy"]
    command += ["--load-format", "dummy", "--raw", "--json", "--max-tokens", "2", "--n", "2"]
    command += ["--logprobs", "1", "--prompt-logprobs", "1", "one"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    section = PAGE.read_text().partition("## The document")[2]
    names = re.findall(r"`(\w+)`", section)
    assert keys_of(json.loads(done.stdout)) <= set(names)
