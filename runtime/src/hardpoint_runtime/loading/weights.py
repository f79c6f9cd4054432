"""A model's weights as a stream: names and shapes known at once, tensors one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from hardpoint.errors import UnsupportedError
from torch import Tensor

from hardpoint_runtime.quantization.packed_form import StoredRows


class Weights(ABC):
    """What :func:`hardpoint_runtime.loading.open_weights` gives. Used in the worker, as a context.

    ``shapes`` maps the Hugging Face name of each tensor to its shape, in the order of reading.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face names of all tensors."""
        return tuple(self.shapes)

    def iterate(
        self, dtype: torch.dtype, names: Container[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each name (of those in ``names``, if given) with its tensor, on the host,
        contiguous, in ``dtype``.

        Each tensor is the receiver's own: nothing here keeps or reuses it. Only one is in memory at
        a time if the receiver lets go of it. Raises CheckpointError naming the tensor.
        """
        for name in self.shapes:
            if names is None or name in names:
                yield name, self.read(name, dtype)

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one tensor; KeyError if there is none of that name."""

    def stored_type(self, name: str) -> str | None:
        """Return the element or block type that the files have a tensor in, by GGUF's names; None
        if that is not known.
        """
        return None

    def read_stored(self, name: str) -> StoredRows:
        """Read the rows of a tensor of a block type, not unpacked, in the order of Hugging Face
        models. Only called where :meth:`stored_type` names that type.
        """
        raise UnsupportedError("packed rows", type(self).__name__, reason=f"asked for {name}")

    def files(self) -> Sequence[Path]:
        """Return every file that the tensors come from; none where that is not known: what is made
        of them is then not kept for the next time.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Close the files. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
