"""Adapters as the driver names them. Equality is by identity number and content, never by name
alone.
"""

from __future__ import annotations

from attrs import field, frozen

from hardpoint.errors import InvalidRequestError


def _positive(owner: object, attribute: object, value: int) -> None:
    if value < 1:
        raise InvalidRequestError(
            f"adapter id must be at least 1, not {value}", field="id", value=value
        )


def _filled(owner: object, attribute: object, value: str) -> None:
    if not value:
        raise InvalidRequestError("an adapter needs a name and a path", field="path", value=value)


@frozen(kw_only=True)
class LoRARequest:
    """A LoRA adapter: number >= 1, name, folder, SHA-256 of its content (filled by the driver)."""

    id: int = field(validator=_positive)
    name: str = field(validator=_filled, eq=False)
    path: str = field(validator=_filled, eq=False)
    digest: str = ""
    reload_in_place: bool = field(default=False, eq=False)


@frozen(kw_only=True)
class PromptAdapterRequest:
    """A soft prompt of ``num_virtual_tokens`` rows."""

    id: int = field(validator=_positive)
    name: str = field(validator=_filled, eq=False)
    path: str = field(validator=_filled, eq=False)
    num_virtual_tokens: int = 0
    digest: str = ""
