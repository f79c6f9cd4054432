"""Plugins' own settings: raw keys under ``plugins.NAME`` become an instance of the frozen attrs
class that the plugin's record names. Fields are declared with :func:`hardpoint.config.schema.key`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin

from attrs import fields, has, resolve_types

from hardpoint.config import values
from hardpoint.config.problems import config_error, did_you_mean, with_origin
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

    ``raw`` is a mapping, None for no keys, or an instance of ``cls``, returned as it is. With
    ``origins`` (``Config.origins``) errors say who set a value. Raises ConfigError with every
    problem under its path ``plugins.NAME.KEY``, and PluginError if the class cannot be used.
    """
    from cattrs.errors import BaseValidationError, StructureHandlerNotFoundError

    if not has(cls):
        raise PluginError(f"plugin {name!r}: its settings {cls!r} are no attrs class")
    if isinstance(raw, cls):
        return cast("T", raw)
    raw = {} if raw is None else raw
    path = f"plugins.{name}"
    if not isinstance(raw, Mapping):
        raise config_error([Problem(key=path, value=raw, message="must be a table of keys.")])
    converter = _converter()
    try:
        settings: Any = converter.structure(raw, cls)
        problems = list(_refusals(settings, path, raw))
    except BaseValidationError as group:
        problems = list(_problems(group, path, raw, cls))
        problems += _refusals_beside(converter, cls, raw, path, problems)
    except StructureHandlerNotFoundError as error:
        raise PluginError(
            f"plugin {name!r}: a field of its settings {cls.__qualname__} has a type that cannot "
            f"be read from a configuration: {error}"
        ) from error
    if problems:
        raise config_error([with_origin(problem, origins or {}) for problem in problems])
    return cast("T", settings)


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
        pairs = [(name, getattr(value, name)) for name in _field_names(type(value))]
    elif prefix:
        yield prefix, value
        return
    if prefix and not pairs:
        yield prefix, {}
    for key, content in pairs:
        yield from _leaves(content, f"{prefix}.{key}" if prefix else str(key))


def _field_names(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def _converter() -> Converter:
    """A strict converter: reads texts of the environment as the field's type, all else as it is."""
    from cattrs import Converter

    converter = Converter(detailed_validation=True, forbid_extra_keys=True)
    readers = {int: values.whole, float: values.number, bool: values.truth, str: values.string}
    for kind, read in readers.items():
        converter.register_structure_hook(kind, _reading(read))
    converter.register_structure_hook_func(
        _is_list, lambda value, hint: _structure_items(converter, value, hint)
    )
    return converter


def _reading(read: Callable[[object], Any]) -> Callable[[object, Any], Any]:
    return lambda value, hint: read(value)


def _is_list(hint: Any) -> bool:
    arguments = get_args(hint)
    alike = len(arguments) == 1 or arguments[1:] == (...,)
    return alike and get_origin(hint) in (tuple, list, set, frozenset)


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


def _problems(group: Any, path: str, value: Any, hint: Any) -> Iterator[Problem]:
    """Yield a problem for each leaf of the error that cattrs raised for ``value``, of the type
    ``hint``, at ``path``.
    """
    from cattrs.errors import (
        AttributeValidationNote,
        ClassValidationError,
        ForbiddenExtraKeysError,
        IterableValidationNote,
    )

    if isinstance(group, ClassValidationError) and not isinstance(value, Mapping):
        yield Problem(key=path, value=_plain(value), message="must be a table of keys.")
        return
    if isinstance(group, ForbiddenExtraKeysError):
        known = _field_names(group.cl)
        for name in sorted(map(str, group.extra_fields)):
            yield _unknown(f"{path}.{name}", value.get(name), path, known)
        return
    if not isinstance(group, BaseExceptionGroup):
        yield Problem(key=path, value=_plain(value), message=f"{_reason(group, hint)}.")
        return
    for error in group.exceptions:
        below, inner, of = path, value, hint
        for note in getattr(error, "__notes__", ()):
            step: Any = None
            if isinstance(note, AttributeValidationNote):
                step = note.name
            elif isinstance(note, IterableValidationNote):
                step = note.index
            if step is not None:
                below = f"{path}.{step}"
                inner, of = _below(value, step), note.type
        yield from _problems(error, below, inner, of)


def _reason(error: BaseException, hint: Any) -> str:
    """Say what a value of type ``hint`` must be, where the error's own words are a program's."""
    options = [option for option in get_args(hint) if option is not type(None)]
    if get_origin(hint) in (Union, UnionType) and len(options) == 1:
        return _reason(error, options[0])
    if get_origin(hint) is Literal:
        return f"must be one of {', '.join(map(str, options))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"must be one of {', '.join(str(member.value) for member in hint)}"
    if isinstance(error, KeyError):
        return "is required"
    container = get_origin(hint)
    if has(hint) or (isinstance(container, type) and issubclass(container, Mapping)):
        return "must be a table of keys"
    return str(error) or type(error).__name__


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


def _refusals(settings: Any, path: str, raw: object) -> Iterator[Problem]:
    """Yield a problem for each given value outside its field's choices or bounds."""
    for field in fields(type(settings)):
        if isinstance(raw, Mapping) and field.name in raw:
            value, key = getattr(settings, field.name), f"{path}.{field.name}"
            yield from _refusals_of(value, key, field.metadata, raw[field.name])


def _refusals_of(
    value: Any, key: str, metadata: Mapping[str, Any], raw: object
) -> Iterator[Problem]:
    if has(type(value)):
        yield from _refusals(value, key, raw)
    elif reason := values.refusal(value, metadata):
        yield Problem(key=key, value=value, message=f"{reason}.")


def _refusals_beside(
    converter: Converter, cls: Any, raw: Mapping[str, Any], path: str, problems: Sequence[Problem]
) -> Iterator[Problem]:
    """Yield the refusals of those fields that could be read although others could not."""
    bad = {problem.key[len(path) + 1 :].partition(".")[0] for problem in problems}
    for field in fields(resolve_types(cls)):
        if field.name in raw and field.name not in bad:
            given, key = raw[field.name], f"{path}.{field.name}"
            value = converter.structure(given, field.type)
            yield from _refusals_of(value, key, field.metadata, given)
