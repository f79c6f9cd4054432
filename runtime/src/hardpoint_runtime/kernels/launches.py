"""How kernels are launched: what Triton would otherwise take from the environment, said here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Final, ParamSpec, TypeVar

import torch
import triton

from hardpoint_runtime.graphs.recording import opaque

_P = ParamSpec("_P")
_R = TypeVar("_R")

EXACT: Final[Mapping[str, object]] = {"enable_fp_fusion": False}
"""Options of kernels whose results are torch's to the bit: no product is fused with a sum."""
FUSED: Final[Mapping[str, object]] = {"enable_fp_fusion": True}
"""Options of kernels that round otherwise than torch in any case."""


def width(size: int, least: int = 1) -> int:
    """Return the size of a tile's dimension that holds ``size`` values: a power of two."""
    return max(least, triton.next_power_of_2(size))


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its last dimension contiguous, as kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def launched(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have recordings of graphs keep a call of ``function``, which launches kernels, whole: torch
    dispatches no launch. It takes tensors and numbers, and does the same with the same ones.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return opaque(function, *args, **kwargs)

    return call
