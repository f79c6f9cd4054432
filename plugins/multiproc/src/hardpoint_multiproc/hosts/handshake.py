"""What a follower says of itself, and what must agree before a worker is started."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hardpoint
from attrs import frozen
from hardpoint.checkpoints import fingerprint
from hardpoint.errors import CheckpointError
from hardpoint.metadata import Plugin, ResolvedPlugin
from hardpoint.records import shown

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription

UNREADABLE = ""
"""Stands in for the files of a model that cannot be read."""
PROTOCOL = 2
"""The number of this handshake, and of all that is said after it."""

OWN = frozenset({"executor", "devices", "log_level", "nnodes", "plugins.mp.leader",
                 "plugins.mp.key_file", "plugins.mp.start", "plugins.mp.bind"})  # fmt: skip
"""Keys that each host may have as it likes."""


@frozen(kw_only=True)
class Installation:
    """What of one host must agree with the others: versions, plugins, settings as they are shown.

    ``plugins`` maps kind and name to distribution and version; ``settings`` the keys' paths to
    their values.
    """

    protocol: int
    core: str
    api: str
    plugins: Mapping[str, str]
    settings: Mapping[str, str]

    def told(self) -> dict[str, Any]:
        """Return it as it travels."""
        return {
            "protocol": self.protocol,
            "core": self.core,
            "api": self.api,
            "plugins": dict(self.plugins),
            "settings": dict(self.settings),
        }

    @classmethod
    def heard(cls, data: Mapping[str, Any]) -> Installation:
        """Return what :meth:`told` made. Raises ValueError, TypeError or KeyError."""
        tables = [{str(k): str(v) for k, v in data[name].items()} for name in
                  ("plugins", "settings")]  # fmt: skip
        return cls(
            protocol=int(data["protocol"]),
            core=str(data["core"]),
            api=str(data["api"]),
            plugins=tables[0],
            settings=tables[1],
        )

    @property
    def hash(self) -> str:
        """A short name of all settings together, for logs."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.settings.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def installation(
    plugins: Iterable[Plugin | ResolvedPlugin], settings: Iterable[tuple[str, Any]]
) -> Installation:
    """Return what there is of one host: ``plugins`` that it has, or uses; ``settings`` as (path,
    value).
    """
    return Installation(
        protocol=PROTOCOL,
        core=hardpoint.__version__,
        api=".".join(map(str, hardpoint.API)),
        plugins={f"{p.kind} {p.name}": f"{p.distribution} {p.version}" for p in plugins},
        settings={path: shown(value) for path, value in settings if path not in OWN},
    )


def difference(leader: Installation, follower: Installation, host: str) -> str:
    """Return what does not agree, with both values; empty if all does.

    A follower may have more plugins than are used; of its settings those count that somebody set.
    """
    pairs: Sequence[tuple[str, object, object]] = [
        ("the protocol of this handshake", leader.protocol, follower.protocol),
        ("the version of hardpoint", leader.core, follower.core),
        ("the contract API", leader.api, follower.api),
        *(
            (f"plugin {name}", its, follower.plugins.get(name, "not installed"))
            for name, its in leader.plugins.items()
        ),
        *(
            (f"the key {key}", leader.settings.get(key, "unset"), its)
            for key, its in follower.settings.items()
        ),
    ]
    return next(
        (f"{what} is {ours} at the leader, {theirs} at {host}"
         for what, ours, theirs in pairs if ours != theirs),
        "",
    )  # fmt: skip


@frozen
class Model:
    """The model of the leader: where it is, and what its files are."""

    path: Path
    format: str
    files: Mapping[str, str]

    @classmethod
    def of(cls, description: ModelDescription) -> Model:
        """Look at its files. Raises CheckpointError."""
        path, kind = description.path.absolute(), description.format
        return cls(path, kind, fingerprint.fingerprint(path, kind))

    def question(self) -> dict[str, Any]:
        """Return what a follower is asked, to say hello again with its ``files``."""
        return {"op": "files", "path": str(self.path), "format": self.format}

    def difference(self, files: Mapping[str, str], host: str) -> str:
        """Return which file is another on the follower's ``host``, with both values; or empty."""
        theirs = {str(name): str(told) for name, told in files.items()}
        if self.files and UNREADABLE in theirs:
            return f"{host} has not the leader's model: {theirs[UNREADABLE][:500]}"
        found = fingerprint.difference(self.files, theirs)
        if found is None:
            return ""
        name, here, there = found
        return f"the model's file {name} is {here} at the leader, {there} at {host}"


def files_of(question: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of the model that a leader asks for; where it is not, why."""
    try:
        return fingerprint.fingerprint(Path(str(question["path"])), str(question["format"]))
    except CheckpointError as error:
        return {UNREADABLE: str(error)}


def split(workers: int, hosts: int) -> tuple[range, ...]:
    """Return each host's ranks: consecutive, the first hosts have one more where it does not divide
    evenly.
    """
    each, more = divmod(workers, hosts)
    starts = [node * each + min(node, more) for node in range(hosts + 1)]
    return tuple(range(starts[node], starts[node + 1]) for node in range(hosts))
