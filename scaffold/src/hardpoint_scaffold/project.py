"""A project: rendered from templates in memory, then written to a folder in one move."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import hardpoint
import jinja2
from hardpoint.capabilities import RESERVED, Capability

from hardpoint_scaffold.errors import ProjectFolderError
from hardpoint_scaffold.names import PluginNames

SUFFIX = ".jinja"
"""What the name of every template ends with."""
PACKAGE = "PACKAGE"
"""What stands for the package's folder in the paths of templates."""


def render(names: PluginNames) -> dict[str, str]:
    """Return path below the project's folder -> text, in alphabetical order of the paths.

    From the templates of ``common`` and of the plugin's kind.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - what comes out is Python, TOML and Markdown
    )
    values = _values(names)
    files = {}
    for part in ("common", names.kind):
        folder = resources.files(__package__) / "templates" / part
        for path, template in _templates(folder):
            place = path.removesuffix(SUFFIX).replace(PACKAGE, names.package)
            files[place] = environment.from_string(template.read_text("utf-8")).render(values)
    return dict(sorted(files.items()))


def write(names: PluginNames, files: Mapping[str, str]) -> Path:
    """Write the project's folder into the current one; return it, relative.

    It is written beside its place under another name and moved there when it is complete, so that
    it is never there in part. Raises ProjectFolderError, then and when interrupted leaving nothing.
    """
    target = Path(names.distribution)
    if target.exists() or target.is_symlink():
        raise ProjectFolderError(
            f"./{target} exists. Move it away, or change to another folder: nothing is overwritten."
        )
    try:
        with _unfinished(names) as folder:
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            folder.rename(target)
    except OSError as error:
        raise ProjectFolderError(
            f"./{target} cannot be written: {error.strerror or error}. Change to a folder in which "
            "files can be made."
        ) from error
    return target


@contextlib.contextmanager
def _unfinished(names: PluginNames) -> Iterator[Path]:
    folder = Path(f".{names.distribution}-{secrets.token_hex(4)}")
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield f"{prefix}{entry.name}", entry


def _values(names: PluginNames) -> dict[str, object]:
    major, minor = hardpoint.__version__.split(".")[:2]
    return {
        "kind": names.kind,
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "prefix": names.prefix,
        "api": hardpoint.API,
        "requires": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "capabilities": [(each.name, each.value) for each in Capability],
        "reserved": [each.name for each in RESERVED],
        "toolkit": OFFERED_BY_THE_TOOLKIT,
    }


OFFERED_BY_THE_TOOLKIT = frozenset(
    {
        Capability.CHUNKED_PREFILL.name,
        Capability.PREFIX_CACHING.name,
        Capability.LOGPROBS.name,
        Capability.PROMPT_LOGPROBS.name,
        Capability.LOGPROBS_MODES.name,
        Capability.GRAMMAR.name,
        Capability.POOLING.name,
        Capability.BLOCK_COPIES.name,
        Capability.LOGITS_PROCESSORS.name,
        Capability.TENSOR_PARALLEL.name,
        Capability.PIPELINE_PARALLEL.name,
        Capability.SHARDED_STATE.name,
        Capability.PROFILE.name,
    }
)
"""What a platform has from ``hardpoint_runtime`` on any device, without a line of its own."""
