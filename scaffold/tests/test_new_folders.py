"""The folder appears whole or not at all, and nothing else appears."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hardpoint_scaffold import project
from hardpoint_scaffold.errors import ProjectFolderError
from hardpoint_scaffold.names import checked_names


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("kind", "first"), [("platform", "device.py"), ("executor", "executor.py")]
)
def test_it_asks_nothing_and_says_what_to_do_next(shell, folder, kind, first):
    done = shell("new", kind, "zork")
    assert (done.returncode, done.stderr) == (0, "")
    files = tree(folder)
    assert [path.name for path in folder.iterdir()] == ["hardpoint-zork"]
    assert f"hardpoint-zork: {len(files)} files" in done.stdout
    path = f"hardpoint-zork/src/hardpoint_zork/{first}"
    assert f"edit first    {path}" in done.stdout
    assert (folder / path).read_text().startswith('"""START HERE')
    for command in (
        "pip install --editable",
        "hardpoint doctor zork",
        "hardpoint conformance zork",
    ):
        assert command in done.stdout
    assert {"README.md", "CHANGELOG.md", "pyproject.toml", ".gitignore"} <= {
        name.removeprefix("hardpoint-zork/") for name in files
    }


def test_permissions_are_those_of_any_new_folder(shell, folder):
    shell("new", "platform", "zork", before="import os; os.umask(0o027)")
    assert (folder / "hardpoint-zork").stat().st_mode & 0o777 == 0o750
    assert (folder / "hardpoint-zork" / "README.md").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_exists_is_not_touched(shell, folder, what):
    target = folder / "hardpoint-zork"
    if what == "folder":
        target.mkdir()
    elif what == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    done = shell("new", "platform", "zork")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "./hardpoint-zork exists" in done.stderr
    assert list(folder.iterdir()) == [target]
    assert tree(folder) == (["hardpoint-zork"] if what == "file" else [])


def test_a_folder_made_meanwhile_is_not_touched(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = checked_names("platform", "zork")
    files = project.render(names)

    class Slow(dict):
        def items(self):
            yield from super().items()
            (folder / "hardpoint-zork").mkdir()
            (folder / "hardpoint-zork" / "mine").touch()

    with pytest.raises(ProjectFolderError, match="hardpoint-zork"):
        project.write(names, Slow(files))
    assert tree(folder) == ["hardpoint-zork/mine"]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("before", "cwd", "words"),
    [
        ("", "/proc", "./hardpoint-zork cannot be written"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))",
            None,
            "File too large",
        ),
        ("import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", None, "No such"),
    ],
    ids=["unwritable", "full", "removed"],
)
def test_a_folder_that_cannot_be_written(shell, folder, before, cwd, words):
    done = shell("new", "executor", "zork", before=before, cwd=cwd or folder)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Change to a folder" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(folder.iterdir()) == []


INTERRUPTED = """
import os, pathlib, signal, time
written = pathlib.Path.write_text
def slow(path, *args, **more):
    done = written(path, *args, **more)
    if path.name == "pyproject.toml":
        print("half", flush=True)
        time.sleep(60)
    return done
pathlib.Path.write_text = slow
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interruption_leaves_no_half_of_it(folder, number):
    code = f"import sys\n{INTERRUPTED}\nfrom hardpoint.cli import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, "new", "platform", "zork"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "half\n"
        assert not (folder / "hardpoint-zork").exists()
        running.send_signal(number)
        code = running.wait(30)
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    left = [path.name for path in folder.iterdir()]
    # Nothing can tidy up after SIGKILL; what is left is hidden, and no obstacle.
    assert left == [] if number == signal.SIGINT else left[0].startswith(".hardpoint-zork-")
    assert not (folder / "hardpoint-zork").exists()


def test_a_wrong_name_is_one_sentence_and_writes_nothing(shell, folder):
    done = shell("new", "platform", "Zork")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'zork'?" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_kind_that_is_none(shell):
    done = shell("new", "platfrom", "zork")
    assert done.returncode == 2
    assert "platform" in done.stderr
