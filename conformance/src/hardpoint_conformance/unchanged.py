"""Whether plugins leave the configuration alone that they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import asdict
from hardpoint.config import Config

from hardpoint_conformance.contract import expect


def as_data(config: Config) -> Any:
    """Return a deep copy of a configuration as plain data."""
    return asdict(config, value_serializer=lambda _, __, value: _plain(value))


@contextmanager
def unchanged(config: Config, who: str) -> Iterator[None]:
    """Raise ContractError if what is done inside, by ``who``, writes into ``config``."""
    before = as_data(config)
    yield
    after = as_data(config)
    changed = [key for key in before if before[key] != after[key]]
    expect(
        not changed, "a plugin never changes the configuration that it is given",
        seen=f"{who} changed {', '.join(changed)}", where="hardpoint.hookspecs",
        do="Return what shall be changed from the hook hardpoint_configure.",
    )  # fmt: skip


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
