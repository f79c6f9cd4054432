"""Every key by its path: for loading, for the command line, for documentation and for changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from attrs import Attribute, evolve, fields, frozen, has

from hardpoint.config import values
from hardpoint.config.problems import close, config_error, did_you_mean
from hardpoint.config.schema import Config, PluginsConfig
from hardpoint.records import Problem

PREFIX = "HARDPOINT_"
"""What the name of every environment variable begins with."""


@frozen(kw_only=True)
class Key:
    """One configuration key.

    ``path`` is its public name (``dtype``, ``plugins.disable``); ``section`` and ``name`` say where
    it lives in :class:`Config`. ``type`` is str, int, float, bool, tuple (of texts, or of whole
    numbers) or dict (of texts). ``optional`` keys are None until somebody decides. ``flag`` is
    None where only ``--set`` makes sense.
    """

    path: str
    section: str
    name: str
    type: type
    optional: bool
    default: Any
    help: str
    metadata: Mapping[str, Any]
    reader: Callable[[object], Any]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, empty for any."""
        return tuple(self.metadata.get("choices") or ())

    @property
    def flag(self) -> str | None:
        """The command-line flag (``--max-num-seqs``)."""
        return None if self.type is dict else "--" + self.path.replace("_", "-").replace(".", "-")

    @property
    def variable(self) -> str:
        """The environment variable (``HARDPOINT_MAX_NUM_SEQS``)."""
        return variable_of(self.path)

    def read(self, value: object) -> Any:
        """Return ``value`` in this key's type and bounds; ValueError says what it must be."""
        result = self.reader(value)
        if reason := values.refusal(result, self.metadata):
            raise ValueError(reason)
        return result


def variable_of(path: str) -> str:
    """Return the environment variable that sets ``path``."""
    return PREFIX + path.replace(".", "__").upper()


def _texts(value: object) -> dict[str, str]:
    return {name: values.text(content) for name, content in values.table(value).items()}


_READERS: Mapping[type, Callable[[object], Any]] = {
    str: values.text,
    int: values.whole,
    float: values.number,
    bool: values.truth,
    tuple: values.strings,
    dict: _texts,
}


_DOTTED = ("plugins", "rpc")
"""Sections whose keys carry the section's name: alone they would say nothing."""


def _key(attribute: Attribute[Any], hint: Any, section: str) -> Key:
    options = [option for option in get_args(hint) or (hint,) if option is not type(None)]
    origin = get_origin(hint)
    kind: Any = origin if origin in (tuple, Mapping) else options[0]
    kind = get_origin(kind) or kind
    if isinstance(kind, type) and issubclass(kind, Mapping):
        kind = dict
    default = attribute.default
    return Key(
        path=f"{section}.{attribute.name}" if section in _DOTTED else attribute.name,
        section=section,
        name=attribute.name,
        type=kind,
        optional=default is None,
        default={} if kind is dict else default,
        help=attribute.metadata["help"],
        metadata=attribute.metadata,
        reader=_reader(kind, options, hint if origin is tuple else options[0]),
    )


def _reader(kind: type, options: list[Any], hint: Any) -> Callable[[object], Any]:
    if type in options:
        return values.reference
    if kind is tuple and int in get_args(hint):
        return values.wholes
    return values.references if kind is tuple and str not in get_args(hint) else _READERS[kind]


def _collect() -> Iterator[Key]:
    hints = get_type_hints(Config, localns={"ModelDescription": object})
    for attribute in fields(Config):
        hint = hints[attribute.name]
        if has(hint):
            inner = get_type_hints(hint)
            for field in fields(hint):
                if (hint, field.name) != (PluginsConfig, "settings"):
                    yield _key(field, inner[field.name], attribute.name)
        elif "help" in attribute.metadata:
            yield _key(attribute, hint, "")


KEYS: tuple[Key, ...] = tuple(_collect())
"""Every key of the core, in the order of the schema. Plugins' own keys are not among them."""

BY_PATH: Mapping[str, Key] = {key.path: key for key in KEYS}


def find_key(path: str) -> Key | None:
    """Return the core's key that ``path`` is, or of which it is an entry (``plugins.provider.x``),
    or None.
    """
    found = BY_PATH.get(path)
    if found is None and path.count(".") >= 2:
        table = BY_PATH.get(path.rpartition(".")[0])
        return table if table is not None and table.type is dict else None
    return found


def is_plugin_key(path: str) -> bool:
    """Whether ``path`` is ``plugins.NAME.KEY`` for a plugin's own key (of any depth)."""
    head, *rest = path.split(".")
    reserved = [field.name for field in fields(PluginsConfig)]
    return head == "plugins" and len(rest) >= 2 and all(rest) and rest[0] not in reserved


def unknown_key(path: str, value: object, origin: str) -> Problem:
    """Return the problem of a ``path`` that is no key: close matches, or where it belongs."""
    from hardpoint.sampling_params import SamplingParams

    last = path.rpartition(".")[2].replace("-", "_").lower()
    way_out = did_you_mean(path.replace("-", "_"), BY_PATH)
    if last in BY_PATH:
        way_out = f"Did you mean {last}?"
    elif last in [field.name for field in fields(SamplingParams)]:
        way_out = f"{last} is a sampling parameter, not a configuration key."
    elif path.startswith("plugins.") and path.count(".") == 1:
        near = close(last, [key.name for key in KEYS if key.section == "plugins"])
        way_out = f"A plugin's own keys are {path}.KEY."
        way_out = f"Did you mean plugins.{near[0]}?" if near else way_out
    return Problem(
        key=path,
        value=value,
        message="is not a configuration key.",
        way_out=way_out or "`hardpoint doctor` lists all keys.",
        origin=origin,
    )


def get(config: Config, path: str) -> Any:
    """Return the value of ``path``, a plugin's key included (None where it is not set).

    Raises ConfigError with close matches for a path that is no key.
    """
    if (key := find_key(path)) is not None:
        owner = getattr(config, key.section) if key.section else config
        value = getattr(owner, key.name)
        return value if key.path == path else value.get(path[len(key.path) + 1 :])
    if not is_plugin_key(path):
        raise config_error([unknown_key(path, None, "")])
    value = config.plugins.settings
    for part in path.split(".")[1:]:
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def replace(config: Config, changes: Mapping[str, Any], origin: str) -> Config:
    """Return ``config`` with each path of ``changes`` set to its value, which ``origin`` chose.

    None unsets an optional key. Raises ConfigError with every problem: unknown path, wrong type,
    out of range.
    """
    problems: list[Problem] = []
    good: dict[str, Any] = {}
    for path, value in changes.items():
        problem = _accept(path, value, origin, good)
        problems += [problem] if problem else []
    if problems:
        raise config_error(problems)
    return place(config, good, dict.fromkeys(good, origin))


def _accept(path: str, value: object, origin: str, good: dict[str, Any]) -> Problem | None:
    key = find_key(path)
    if key is None and not is_plugin_key(path):
        return unknown_key(path, value, origin)
    try:
        if key is None or (value is None and key.optional):
            good[path] = value
        else:
            good[path] = key.read(value) if key.path == path else values.text(value)
    except ValueError as error:
        return Problem(key=path, value=value, message=f"{error}.", origin=origin)
    return None


def place(config: Config, changes: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """Return ``config`` with values that were read already, and their origins. Paths must be known.

    Raises ConfigError where a plugin's selected settings refuse a value.
    """
    sections: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        key = find_key(path)
        if key is None:
            name, _, rest = path.partition(".")[2].partition(".")
            settings.setdefault(name, {})[rest] = value
        elif key.path == path:
            sections.setdefault(key.section, {})[key.name] = value
        else:
            section = sections.setdefault(key.section, {})
            entries = section.get(key.name, getattr(getattr(config, key.section), key.name))
            section[key.name] = {**entries, path[len(key.path) + 1 :]: value}
    if settings:
        from hardpoint.settings import changed_settings

        merged = dict(config.plugins.settings)
        for name, entries in settings.items():
            merged[name] = changed_settings(merged.get(name), entries, name, origins)
        sections.setdefault("plugins", {})["settings"] = merged
    inner = {
        section: evolve(getattr(config, section), **entries)
        for section, entries in sections.items()
        if section
    }
    return evolve(config, **sections.get("", {}), **inner, origins={**config.origins, **origins})
