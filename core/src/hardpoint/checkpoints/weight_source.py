"""A model's weights as a stream of host arrays of no particular library.

What a plugin's weight loader is (``hardpoint_weight_loaders``): any platform takes its arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from hardpoint.errors import UnsupportedModelError
from hardpoint.references import resolve

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.records import Offer


class HostArray(Protocol):
    """What numpy's arrays are, and tensors of most libraries: memory of the host by DLPack."""

    def __dlpack__(self, **options: Any) -> Any:
        """Return the array's capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of its memory and an index."""


class WeightSource(ABC):
    """Opened with a :class:`ModelDescription`, in the worker; used as a context.

    ``shapes`` maps the Hugging Face name of each tensor to its shape, in the order of reading.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def read(self, name: str) -> HostArray:
        """Return a tensor as float32, float16 or float64 (bfloat16 is widened: few libraries hand
        it on), contiguous, writable and the receiver's own. KeyError if there is none of that name,
        CheckpointError naming it if it cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the files. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def offered_source(
    offers: Mapping[str, Offer], description: ModelDescription, own: type[Any] = WeightSource
) -> Any:
    """Open the loader among ``offers`` (by format) for a described model; None if there is none.

    Called by platforms when they load. ``own`` is a kind of loader that this platform takes beside
    a WeightSource. Raises UnsupportedModelError for a loader that is neither.
    """
    offer = offers.get(description.format)
    if offer is None:
        return None
    source = resolve(offer.reference)(description)
    if not isinstance(source, WeightSource | own):
        raise UnsupportedModelError(
            f"{description.path}: the loader {offer.reference!r} that is offered for platform "
            f"{offer.platform!r} gives {type(source).__qualname__}, and here a "
            f"{WeightSource.__qualname__} is needed; offer it for the platforms that take it"
        )
    return source
