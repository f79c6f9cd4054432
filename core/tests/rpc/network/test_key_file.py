"""The key file: what was made for one run ends with it, however that ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
from hardpoint.errors import ConfigError
from hardpoint.rpc.network import key_file

MAKER = """
import sys
from pathlib import Path
from hardpoint.rpc.network import key_file
kept = key_file.write_for_run(Path(sys.argv[1]))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def maker(path):
    """A process that has made a key file for its run."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "made\n"
    yield process
    process.kill()
    process.communicate()


def test_what_a_killed_maker_left_is_never_used_again(path, maker):
    old = key_file.read(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not key_file.left_over(path)
    assert key_file.read_or_write(path) == (old, None), "the control: its maker lives"
    assert key_file.awaited(path, 0.0) == old
    maker.kill()
    maker.wait()
    assert key_file.left_over(path)
    with pytest.raises(ConfigError, match="is left over of a process that is gone"):
        key_file.awaited(path, 0.0)
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(key_file.awaited(path, 60.0)))
    thread.start()  # looks at it, again and again
    keys, made = key_file.read_or_write(path)
    thread.join(60)
    assert waiting == [keys]
    assert keys != old
    assert path.stat().st_mode & 0o777 == 0o600
    made.remove()
    made.remove()
    assert not path.exists()


def test_a_file_that_was_not_made_for_a_run_stays_and_so_does_a_copy_of_one(path, maker):
    copy, staying = path.with_name("copy"), path.with_name("staying")
    shutil.copy2(path, copy)
    keys = key_file.write(staying)
    maker.kill()
    maker.wait()
    assert not key_file.left_over(copy, remove=True)
    assert key_file.read_or_write(copy) == (key_file.read(path), None)
    assert not key_file.left_over(staying, remove=True)
    assert key_file.read_or_write(staying) == (keys, None)


@pytest.mark.parametrize("kind", ["folder", "fifo", "text", "none"])
def test_nothing_else_is_taken_for_a_key_file_that_was_left(path, kind):
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "text":
        path.write_text("[]")
    assert not key_file.left_over(path)
    assert not key_file.left_over(path, remove=True)
    assert path.exists() == (kind != "none")
