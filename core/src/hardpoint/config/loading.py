"""Loading: Python, flags, environment and a TOML file become one frozen configuration.

Nothing is taken in silence: every source is read whole, every value is checked even where a
stronger source overrides it, and all that is wrong is told in one error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from hardpoint.config.keys import (
    BY_PATH,
    PREFIX,
    find_key,
    is_plugin_key,
    place,
    unknown_key,
    variable_of,
)
from hardpoint.config.problems import close, config_error
from hardpoint.config.schema import Config
from hardpoint.config.values import Text, table, text
from hardpoint.records import Problem
from hardpoint.rpc.faults import VARIABLE as FAULTS_VARIABLE

CONFIG_VARIABLE = "HARDPOINT_CONFIG"
DISABLE_VARIABLE = "HARDPOINT_DISABLE"
_NO_KEYS = frozenset({CONFIG_VARIABLE, FAULTS_VARIABLE})
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16

_FILE, _ENVIRONMENT, _EXPLICIT = range(3)


@frozen(kw_only=True)
class Setting:
    """One value that somebody gave: where (``rank`` orders the sources), for which key, and who."""

    path: str
    value: Any
    origin: str
    rank: int


class TooDeep:
    """Stands for a table that is nested deeper than any key."""

    def __repr__(self) -> str:
        return "{...}"


def load_config(
    *,
    overrides: Mapping[str, Any] = {},
    flags: Mapping[str, Any] = {},
    file: str | Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Return the configuration that the sources give together; called in the driver, for an engine.

    The strongest first: ``overrides`` (Python keywords), ``flags`` (key path -> value as the
    command line has it) and ``sets`` (``"KEY=VALUE"``); then ``HARDPOINT_<KEY>`` of ``environ``
    (the process's own if None; dots are ``__``; an empty variable counts as unset); then the TOML
    ``file``, or the one that ``HARDPOINT_CONFIG`` names; then the schema's defaults. None in
    ``overrides`` and ``flags`` says nothing. Raises ConfigError with every problem at once.
    """
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    settings = [
        *_from_file(file, environ.get(CONFIG_VARIABLE), problems),
        *_from_environment(environ, problems),
        *_flatten("", overrides, "Python", _EXPLICIT),
        *_from_flags(flags),
        *_from_sets(sets, problems),
    ]
    values, origins = _resolve(settings, problems)
    if problems:
        raise config_error(problems)
    return place(Config(), values, origins)


def _flatten(prefix: str, value: Any, origin: str, rank: int, depth: int = 0) -> Iterator[Setting]:
    """Yield the leaves of nested tables with their dotted paths."""
    key = BY_PATH.get(prefix)
    if not isinstance(value, Mapping) or depth > MAX_DEPTH:
        leaf = TooDeep() if isinstance(value, Mapping) else value
        if value is not None:
            yield Setting(path=prefix, value=leaf, origin=origin, rank=rank)
        return
    if not value and prefix and not (prefix.startswith("plugins") and prefix.count(".") < 2):
        yield Setting(path=prefix, value=value, origin=origin, rank=rank)
    for name, content in value.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if key is not None and key.type is dict and isinstance(content, Mapping):
            yield Setting(path=path, value=content, origin=origin, rank=rank)
        else:
            yield from _flatten(path, content, origin, rank, depth + 1)


def _from_file(
    file: str | Path | None, named: str | None, problems: list[Problem]
) -> list[Setting]:
    name = file if file is not None else named
    if not name:
        return []
    source = "flag --config" if file is not None else CONFIG_VARIABLE
    try:
        content = _read_toml(Path(name))
    except ValueError as error:
        problems.append(Problem(key="config", value=str(name), message=f"{error}.", origin=source))
        return []
    return list(_flatten("", content, f"file {name}", _FILE))


def _read_toml(path: Path) -> Mapping[str, Any]:
    """Read a small regular file of TOML; ValueError says what is wrong with it."""
    import tomllib

    content = _read_text(path)
    try:
        return tomllib.loads(content)
    except ValueError as error:
        raise ValueError(f"is not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _read_text(path: Path) -> str:
    try:
        if not path.is_file():
            reason = "is no regular file" if path.exists() else "there is no such file"
        elif path.stat().st_size > MAX_FILE_BYTES:
            reason = f"is larger than {MAX_FILE_BYTES} bytes"
        else:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {error.start}"
    raise ValueError(reason)


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> list[Setting]:
    settings = []
    for variable, content in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in _NO_KEYS or not content:
            continue
        path = variable.removeprefix(PREFIX).lower().replace("__", ".")
        path = "plugins.disable" if variable == DISABLE_VARIABLE else path
        if variable in (DISABLE_VARIABLE, variable_of(path)) and _is_known(path):
            setting = Setting(path=path, value=Text(content), origin=variable, rank=_ENVIRONMENT)
            settings.append(setting)
        else:
            problems.append(_unknown_variable(variable, content))
    return settings


def _unknown_variable(variable: str, content: str) -> Problem:
    known = [variable_of(path) for path in BY_PATH] + [CONFIG_VARIABLE, DISABLE_VARIABLE]
    near = close(variable.upper()[len(PREFIX) :], [name[len(PREFIX) :] for name in known])
    names = " or ".join(PREFIX + name for name in near)
    way_out = f"Did you mean {names}?" if near else "Unset it; `hardpoint doctor` lists all keys."
    return Problem(
        key=variable, value=content, message="is not a variable of Hardpoint.", way_out=way_out
    )


def _from_flags(flags: Mapping[str, Any]) -> Iterator[Setting]:
    for path, value in flags.items():
        key = BY_PATH.get(path)
        origin = f"flag {(key.flag if key else None) or '--' + path}"
        for setting in _flatten(path, value, origin, _EXPLICIT):
            content = setting.value
            typed = Text(content) if type(content) is str else content
            yield Setting(path=setting.path, value=typed, origin=origin, rank=_EXPLICIT)


def _from_sets(sets: Sequence[str], problems: list[Problem]) -> list[Setting]:
    settings = []
    for given in sets:
        name, sign, content = given.partition("=")
        path = name.strip()
        if not sign or not path:
            problems.append(
                Problem(
                    key="--set",
                    value=given,
                    message="is not of the form KEY=VALUE.",
                    way_out="Write for example --set max_num_seqs=8.",
                )
            )
            continue
        settings.append(
            Setting(path=path, value=Text(content), origin=f"flag --set {path}", rank=_EXPLICIT)
        )
    return settings


def _is_known(path: str) -> bool:
    return find_key(path) is not None or is_plugin_key(path)


def _entries(setting: Setting, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and typed values of one setting: several where a whole table was given."""
    key = find_key(setting.path)
    try:
        if key is None and is_plugin_key(setting.path):
            if isinstance(setting.value, TooDeep):
                problems.append(_wrong_value(setting, f"is nested more than {MAX_DEPTH} deep"))
            else:
                yield setting.path, setting.value
        elif key is None:
            problems.append(unknown_key(setting.path, setting.value, setting.origin))
        elif key.path != setting.path:
            yield setting.path, text(setting.value)
        elif key.type is dict:
            for name, content in table(setting.value).items():
                yield f"{key.path}.{name}", text(content)
        else:
            yield setting.path, key.read(setting.value)
    except ValueError as error:
        problems.append(_wrong_value(setting, str(error)))


def _wrong_value(setting: Setting, reason: str) -> Problem:
    key = find_key(setting.path)
    choices = key.choices if key is not None else ()
    near = close(setting.value, choices) if isinstance(setting.value, str) else []
    return Problem(
        key=setting.path,
        value=str(setting.value) if isinstance(setting.value, Text) else setting.value,
        message=f"{reason}.",
        way_out=f"Did you mean {near[0]}?" if near else "",
        origin=setting.origin,
    )


def _resolve(
    settings: Sequence[Setting], problems: list[Problem]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return value and origin for each path: the strongest source wins, a draw is a problem."""
    winners: dict[str, Setting] = {}
    for setting in sorted(settings, key=lambda one: one.rank):
        for path, value in _entries(setting, problems):
            rival = winners.get(path)
            if rival is not None and rival.rank == setting.rank and rival.value != value:
                message = f"contradicts {rival.value!r} ({rival.origin})."
                way_out = "Give it once."
                problems.append(
                    Problem(
                        key=path,
                        value=value,
                        message=message,
                        way_out=way_out,
                        origin=setting.origin,
                    )
                )
            winners[path] = Setting(
                path=path, value=value, origin=setting.origin, rank=setting.rank
            )
    values = {path: winner.value for path, winner in winners.items()}
    return values, {path: _origin_of(winner) for path, winner in winners.items()}


def _origin_of(setting: Setting) -> str:
    """The origin to keep. "auto" leaves the choice open, so it protects nothing."""
    return f"default (auto by {setting.origin})" if setting.value == "auto" else setting.origin
