"""What all ranks must have in common, and the first thing in which they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import hardpoint
from attrs import fields, has
from hardpoint.checkpoints.fingerprint import fingerprint
from hardpoint.config.resolution import effective
from hardpoint.errors import ConfigError, PluginError
from hardpoint.messages import ModelRunnerOutput
from hardpoint.records import Problem
from hardpoint.worker_calls import DivergedError

from hardpoint_external_launcher.settings import ADDRESS, KEY_FILE

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry

OF_ONE_RANK = frozenset({"devices", "profile_folder", ADDRESS, KEY_FILE})
"""Keys in which ranks may differ."""
CHOSEN = ("req_ids", "tokens", "drafts")
"""Fields of a step's output in which ranks that compute the same do not differ."""
LONGEST_VALUE = 200
MODEL = "the model's description"
FILE = "the model's file"


def identity(config: Config, registry: Registry) -> dict[str, str]:
    """Return name -> value, as text, of everything that must be the same on all ranks."""
    found = {"hardpoint": hardpoint.__version__}
    for plugin in registry.resolved():
        found[f"plugin {plugin.name}"] = f"{plugin.distribution} {plugin.version}"
    for path, value, _ in effective(config):
        if path not in OF_ONE_RANK:
            found[path] = _told(value)
    if config.description is not None:
        files = fingerprint(config.description.path, config.description.format)
        found |= {f"{FILE} {name}": told for name, told in files.items()}
        found[MODEL] = digest(config.description)
    return found


def check_identities(identities: Mapping[int, Mapping[str, str]]) -> None:
    """Raise ConfigError, or PluginError for versions, that names the first difference, both values
    and the ranks.
    """
    first = min(identities)
    own = identities[first]
    for rank in sorted(identities):
        other = identities[rank]
        for name in dict.fromkeys((*own, *other)):
            here, there = own.get(name, "unset"), other.get(name, "unset")
            if here == there:
                continue
            text = (
                f"the ranks were not started alike: {name} is {here} on rank {first} and {there} "
                f"on rank {rank}"
            )
            if name == "hardpoint" or name.startswith("plugin "):
                raise PluginError(f"{text}; install the same everywhere")
            problem = Problem(
                key=name,
                value=there,
                message=f"rank {first} has {here}, rank {rank} has {there}.",
                way_out="Start every rank with the same model."
                if name.startswith(FILE)
                else "Start every rank with the same configuration.",
            )
            raise ConfigError(text, problems=(problem,))


def _told(value: object) -> str:
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:40]}... ({digest(value)})"


# The parts of a call.


def digests(name: str, args: Sequence[Any]) -> dict[str, str]:
    """Return name -> digest of what all ranks' calls of this number have in common: the method,
    and for a plan each of its fields.
    """
    found = {"method": name}
    for argument in args:
        kind = type(argument)
        if not has(kind):
            continue
        for each in fields(kind):
            found[f"{kind.__name__}.{each.name}"] = digest(getattr(argument, each.name))
    return found


def outcome(name: str, output: object) -> dict[str, str]:
    """Return name -> digest of what all ranks' workers chose alike in a step: which tokens, of
    which requests. Empty for what is no output of a step.
    """
    if not isinstance(output, ModelRunnerOutput) or not any(output.tokens):
        return {}
    kind = type(output).__name__
    told = {f"{kind}.{each}": digest(getattr(output, each)) for each in CHOSEN}
    return {"method": name, **told}


def check_digests(call_id: int, found: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DivergedError that names the first field in which a rank's call differs from that of
    the least rank, and that rank.
    """
    least = min(found)
    own = found[least]
    for rank in sorted(found):
        other = found[rank]
        for name in own:
            if name in other and own[name] == other[name]:
                continue
            if name == "method":
                raise DivergedError(
                    f"the ranks diverged at call {call_id}: rank {rank} calls "
                    f"{other.get(name)!r} where rank {least} calls {own[name]!r}. Every rank must "
                    "run the same program, call for call"
                )
            raise DivergedError(
                f"the ranks diverged at call {call_id} ({own['method']}): {name} on rank {rank} is "
                f"not that on rank {least}. What differs between them - the time, an order of "
                "threads, an unseeded draw - must not have a part in what is computed; with "
                "plugins.external_launcher.driver_only = true rank 0 alone decides"
            )


def digest(value: object) -> str:
    """Return 16 hexadecimal digits that depend on a value's content alone, in every process."""
    state = hashlib.blake2b(digest_size=8)
    _feed(state.update, value)
    return state.hexdigest()


def _feed(update: Any, value: object) -> None:
    """Give a value's content: sets in order, records by their fields, all with its kind."""
    kind = type(value)
    if kind in _PLAIN:
        update(f"{kind.__name__}:{value!r};".encode(errors="surrogatepass"))
    elif kind is tuple or kind is list:
        _feed_all(update, "(", value)  # type: ignore[arg-type]
    elif isinstance(value, Mapping):
        _feed_all(update, "{", (part for pair in value.items() for part in pair))
    elif isinstance(value, AbstractSet):
        _feed_all(update, "<", sorted(map(digest, value)))
    elif has(kind):
        _feed_all(update, kind.__name__, (getattr(value, each.name) for each in fields(kind)))
    elif isinstance(value, PurePath | Enum):
        update(f"{kind.__name__}:{value};".encode())
    elif (data := _buffer(value)) is not None:
        update(f"{kind.__name__}:{data.format}:{data.shape};".encode())
        update(data.tobytes())
    elif hasattr(value, "__dict__"):
        _feed_all(update, kind.__name__, (part for pair in vars(value).items() for part in pair))
    else:  # what it is made of is not known here
        update(f"{kind.__name__};".encode())


def _buffer(value: Any) -> memoryview | None:
    """Return the bytes of an array, None for what is none."""
    try:
        return memoryview(value)
    except TypeError:
        return None


def _feed_all(update: Any, mark: str, values: Iterable[object]) -> None:
    update(mark.encode())
    for value in values:
        _feed(update, value)
    update(b")")


_PLAIN = frozenset({int, str, bytes, float, bool, type(None), complex})
