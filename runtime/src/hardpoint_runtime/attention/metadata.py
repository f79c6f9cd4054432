"""What attention must know about one step, once per KV cache group."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import field, frozen

_T = TypeVar("_T")


@frozen(kw_only=True, eq=False)
class AttentionMetadata:
    """One step's batch as attention sees it. Made by :class:`AttentionMetadataBuilder`.

    Sizes: R rows (requests, padded), T tokens (padded), C columns of the block table. Row ``r``
    owns tokens ``query_start[r]:query_start[r + 1]``, the last ones of the ``seq_lens[r]`` tokens
    that it has then. Padding is inert: a padding row has ``seq_lens[r] == 0`` and no token of its
    own, a padding token has slot -1: nothing is written for it, and its output is zero.

    Lengths are on the host too, so that nobody has to wait for the device to know them.
    """

    num_reqs: int
    """Real rows; padding rows follow them."""

    num_tokens: int
    """Real tokens; padding tokens follow them."""

    block_size: int
    max_query: int
    """The most tokens of a row; of a row of any batch of this shape if ``fixed``."""

    max_seq: int

    query_start: tuple[int, ...]
    """Host, R + 1 values, not falling; the tail repeats ``num_tokens``."""

    seq_lens: tuple[int, ...]
    """Host, R values: tokens in the cache once this step is written."""

    host_block_table: np.ndarray[Any, Any]
    """Host, int32 [R, C]."""

    query_start_device: torch.Tensor
    """int32 [R + 1]."""

    seq_lens_device: torch.Tensor
    """int32 [R]."""

    block_table: torch.Tensor
    """int32 [R, C] on the device; block 0 is the null block."""

    slots: torch.Tensor
    """int64 [T] on the device: ``block * block_size + offset`` where each token is written, or
    -1.
    """

    positions: torch.Tensor
    """int64 [T] on the device: each token's position in its request; 0 for padding."""

    write_rows: torch.Tensor | None
    """int64 on the device: the tokens whose slot is not -1; None if that is all of them."""

    write_slots: torch.Tensor
    """int64 on the device: the slots of ``write_rows``."""

    fixed: bool = False
    """Whether this is for a FULL graph: the device tensors are the graph's static buffers, and only
    they, their shapes, ``block_size`` and ``max_query`` may decide what an attention does. All
    other host values are those of one batch among many. ``write_slots`` has -1 then.
    """

    _derived: dict[Hashable, Any] = field(factory=dict, init=False, repr=False)

    @property
    def padded_tokens(self) -> int:
        """T: real and padding tokens."""
        return int(self.slots.shape[0])

    def derive(self, key: Hashable, make: Callable[[AttentionMetadata], _T]) -> _T:
        """Return ``make(self)``, computed once a step for ``key``.

        An attention operation keeps here what all layers share (gather indices, masks).
        """
        if key not in self._derived:
            self._derived[key] = make(self)
        found: _T = self._derived[key]
        return found

    def forget(self) -> None:
        """Derive everything anew: what was derived may not be used by what comes now."""
        self._derived.clear()
