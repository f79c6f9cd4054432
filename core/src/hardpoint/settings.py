"""Plugins' own settings: raw keys under ``plugins.NAME`` become an instance of the frozen attrs
class that the plugin's record names. Fields are declared with :func:`hardpoint.config.schema.key`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from attrs import evolve, fields, has

from hardpoint.config import values
from hardpoint.config.problems import config_error, did_you_mean
from hardpoint.errors import PluginError
from hardpoint.records import Problem

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")


def structure_settings(
    cls: type[T], raw: object, name: str, origins: Mapping[str, str] | None = None
) -> T:
    """Return an instance of ``cls`` from the raw keys of plugin ``name``; called in the driver when
    the plugin is selected.

    ``raw`` is a mapping, None for no keys, or an instance of ``cls``, returned as it is. ``origins``
    (``Config.origins``) lets errors say who set a value. Raises ConfigError with every problem
    under its path ``plugins.NAME.KEY``, and PluginError if the class itself cannot be used.
    """
    if isinstance(raw, cls):
        return raw
    from cattrs.errors import BaseValidationError, StructureHandlerNotFoundError

    if not has(cls):
        raise PluginError(f"plugin {name!r}: its settings {cls!r} are no attrs class")
    raw = {} if raw is None else raw
    path = f"plugins.{name}"
    try:
        settings: T = _converter().structure(raw, cls)
    except BaseValidationError as group:
        found = list(_problems(group, path, raw))
        raise config_error([_with_origin(problem, origins or {}) for problem in found]) from None
    except StructureHandlerNotFoundError as error:
        raise PluginError(
            f"plugin {name!r}: a field of its settings {cls.__qualname__} has a type that cannot be "
            f"read from a configuration: {error}"
        ) from error
    refusals = [_with_origin(problem, origins or {}) for problem in _refusals(settings, path)]
    if refusals:
        raise config_error(refusals)
    return settings


def changed_settings(
    current: object, changes: Mapping[str, Any], name: str, origins: Mapping[str, str]
) -> object:
    """Return plugin ``name``'s settings with ``changes`` (path below ``plugins.NAME`` -> value):
    raw keys stay raw, an instance becomes a new instance. Raises as :func:`structure_settings`.
    """
    structured = current is not None and has(type(current))
    raw: dict[str, Any] = {}
    for path, value in (dict(_leaves(current)) | dict(changes)).items():
        inner = raw
        *parents, last = path.split(".")
        for index, parent in enumerate(parents):
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                key = f"plugins.{name}." + ".".join(parents[: index + 1])
                raise config_error([_both(key, f"plugins.{name}.{path}", inner, origins)])
        if isinstance(inner.get(last), dict) and inner[last]:
            key = f"plugins.{name}.{path}"
            raise config_error([_both(key, f"{key}.{next(iter(inner[last]))}", value, origins)])
        inner[last] = value
    return structure_settings(type(current), raw, name, origins) if structured else raw


def settings_leaves(settings: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each key of plugin ``name``'s settings, raw or structured."""
    for path, value in _leaves(settings):
        yield f"plugins.{name}.{path}", value


def _both(key: str, other: str, value: object, origins: Mapping[str, str]) -> Problem:
    return Problem(
        key=key,
        value=value,
        message=f"is a value, yet {other} makes it a table.",
        origin=origins.get(key, ""),
    )


def _leaves(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    pairs: Any = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif value is not None and has(type(value)):
        pairs = [(field.name, getattr(value, field.name)) for field in fields(type(value))]
    elif prefix:
        yield prefix, value
        return
    if prefix and not pairs:
        yield prefix, {}
    for key, content in pairs:
        yield from _leaves(content, f"{prefix}.{key}" if prefix else str(key))


def _converter() -> Converter:
    """A strict converter: reads texts of the environment as the field's type, all else as it is."""
    from cattrs import Converter

    converter = Converter(detailed_validation=True, forbid_extra_keys=True)
    readers = {int: values.whole, float: values.number, bool: values.truth, str: values.text}
    for kind, read in readers.items():
        converter.register_structure_hook(kind, lambda value, _, read=read: read(value))
    for container in (tuple, list, set, frozenset):
        converter.register_structure_hook_func(
            lambda hint, container=container: get_origin(hint) is container,
            lambda value, hint: _structure_items(converter, value, hint),
        )
    return converter


def _structure_items(converter: Converter, value: object, hint: Any) -> Any:
    """Structure a list of one type; a text of the environment is split at commas."""
    from cattrs.errors import IterableValidationError, IterableValidationNote

    of, done, errors = get_args(hint)[0], [], []
    for index, item in enumerate(values.items(value)):
        try:
            done.append(converter.structure(item, of))
        except Exception as error:  # noqa: BLE001 - raised again below, with its place
            error.add_note(IterableValidationNote(f"item {index}", index, of))
            errors.append(error)
    if errors:
        raise IterableValidationError("items", errors, hint)
    return get_origin(hint)(done)


def _problems(group: Any, path: str, value: Any) -> Iterator[Problem]:
    """Yield a problem for each leaf of the error that cattrs raised for ``value`` at ``path``."""
    from cattrs.errors import (
        AttributeValidationNote,
        ClassValidationError,
        ForbiddenExtraKeysError,
        IterableValidationNote,
    )

    if isinstance(group, ClassValidationError) and not isinstance(value, Mapping):
        yield Problem(key=path, value=value, message="must be a table of keys.")
        return
    if isinstance(group, ForbiddenExtraKeysError):
        known = [field.name for field in fields(group.cl)]
        for name in sorted(map(str, group.extra_fields)):
            yield _unknown(f"{path}.{name}", value.get(name), path, known)
        return
    if not isinstance(group, BaseExceptionGroup):
        missing = isinstance(group, KeyError)
        reason = "is required" if missing else str(group) or type(group).__name__
        yield Problem(key=path, value=None if missing else _plain(value), message=f"{reason}.")
        return
    for error in group.exceptions:
        below, inner = path, value
        for note in getattr(error, "__notes__", ()):
            step: Any = None
            if isinstance(note, AttributeValidationNote):
                step = note.name
            elif isinstance(note, IterableValidationNote):
                step = note.index
            if step is not None:
                below = f"{path}.{step}"
                inner = _below(value, step)
        yield from _problems(error, below, inner)


def _below(value: Any, step: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    items = values.items(value)
    return items[step] if isinstance(step, int) and step < len(items) else None


def _plain(value: object) -> object:
    return str(value) if isinstance(value, values.Text) else value


def _unknown(key: str, value: object, path: str, known: list[str]) -> Problem:
    name = key[len(path) + 1 :]
    listed = f"Its keys are {', '.join(known)}." if known else "It has no keys."
    return Problem(
        key=key,
        value=_plain(value),
        message=f"{path} has no such key.",
        way_out=did_you_mean(name, known, listed),
    )


def _refusals(settings: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each value outside the choices or bounds that its field declares."""
    for field in fields(type(settings)):
        value, key = getattr(settings, field.name), f"{path}.{field.name}"
        if has(type(value)):
            yield from _refusals(value, key)
        elif reason := values.refusal(value, field.metadata):
            yield Problem(key=key, value=value, message=f"{reason}.")


def _with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    return evolve(problem, origin=problem.origin or origins.get(problem.key, ""))
