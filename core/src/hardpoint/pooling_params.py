"""How the final hidden states of a prompt become one vector. Travels inside the messages."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from hardpoint.errors import InvalidRequestError

POOLINGS = ("mean", "last", "cls")


def _known(owner: object, attribute: Attribute[str], value: str) -> None:
    if value not in POOLINGS:
        raise InvalidRequestError(
            f"pooling must be one of {', '.join(POOLINGS)}, not {value!r}",
            field="pooling",
            value=value,
        )


@frozen
class PoolingParams:
    """``pooling``: the mean over all tokens of the prompt, the state of its last token, or of its
    first (``cls``). ``normalize`` divides the vector by its length.
    """

    pooling: str = field(default="mean", validator=_known)
    normalize: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether positions before the last must be computed, also where they are cached."""
        return self.pooling != "last"
