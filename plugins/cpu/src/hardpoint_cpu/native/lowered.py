"""What lowering makes: operations over buffers, and where a step pauses between them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from hardpoint_cpu.native.library import TYPES, Matrix, Op

if TYPE_CHECKING:
    from hardpoint_runtime.parallel.communicator import Communicator

(
    EMBED, NORM, LINEAR, ADD, GATED, ROTATE, ATTEND, GATHER,
    ADD_NORM, LAYER_NORM, ACTIVATE, ROUTE, EXPERTS, SIGMOID_ADD,
) = range(14)  # fmt: skip
"""The kinds of operations, as the library numbers them."""

LOGITS = -1
"""The buffer that is the caller's."""

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
KINDS = {dtype: TYPES[name] for dtype, name in NAMES.items()}
"""The types of tensors that operations read where they are."""
CACHED = {**KINDS, torch.int8: TYPES["int8"]}
"""The types of keys and values."""


@frozen(kw_only=True, eq=False)
class Sum:
    """A pause: the other shards' part of a buffer's rows is added to it, and a ``bias``; then the
    buffer itself to another one, if ``target`` names one.
    """

    group: Communicator | None
    buffer: int
    picked: bool
    bias: torch.Tensor | None = None
    target: int | None = None


@frozen(kw_only=True, eq=False)
class Clear:
    """A pause: a buffer's rows become zero."""

    buffer: int
    picked: bool


@frozen(kw_only=True, eq=False)
class Outside:
    """A pause: the rows of a buffer whose tokens another shard embeds become zero."""

    buffer: int


Pause = Sum | Clear | Outside


@frozen(kw_only=True, eq=False)
class Lowered:
    """A model's operations.

    ``ends`` are the places after each layer's last one; ``pauses`` what
    is done after so many operations; ``columns`` those of each buffer; ``held`` what the pointers
    point at. ``vocabulary``: the rows of the embedding and of the logits that this shard has, the
    first of them ``first_token``, and whether that is all of it; ``gathers`` brings the logits of
    all shards together.
    """

    ops: tuple[Op, ...]
    ends: tuple[int, ...]
    pauses: Mapping[int, tuple[Pause, ...]]
    columns: tuple[int, ...]
    positions: int
    heads: int
    vocabulary: int
    first_token: int
    embeds_all: bool
    gathers: tuple[Communicator, tuple[int, ...]] | None
    held: tuple[torch.Tensor, ...] = field(repr=False)

    @property
    def embeds(self) -> bool:
        """Whether a step begins with the embedding, not with what a stage before carried."""
        return bool(self.ops) and self.ops[0].kind == EMBED

    @property
    def has_logits(self) -> bool:
        """Whether a step ends with logits, not with what the next stage takes."""
        return bool(self.ops) and self.ops[-1].out == LOGITS

    def as_array(self) -> ctypes.Array[Op]:
        """Return the operations as the library takes them."""
        return (Op * len(self.ops))(*self.ops)

    def costs(self) -> list[int]:
        """Return about how many bytes of weights each operation reads."""
        return [_bytes_of(op.weight) + _bytes_of(op.other) for op in self.ops]


def _bytes_of(matrix: Matrix) -> int:
    """Return about how many bytes a matrix has; packed ones count a byte for each number."""
    wide = {TYPES["f32"]: 4, TYPES["f32_panels"]: 4, TYPES["bf16"]: 2, TYPES["bf16_panels"]: 2}
    return int(matrix.rows * matrix.cols * wide.get(matrix.type, 1))
