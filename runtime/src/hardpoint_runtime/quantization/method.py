"""The contract of what packs weights: offered by the hook ``hardpoint_quantizations``, chosen by
the key ``quantization``, or the platform's own choice where that is unset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from hardpoint.config import Config
from torch import nn

from hardpoint_runtime.quantization.packed_form import PackedForm, hold_packed

if TYPE_CHECKING:
    from hardpoint_runtime.loading.weights import Weights


@frozen(kw_only=True)
class Piece:
    """The ``rows`` from ``first`` on of a matrix, that come from one tensor of the checkpoint;
    ``stored`` is the type it has there (``BF16``, ``Q4_1``; None: unknown), ``whole`` whether all
    its columns are held.
    """

    first: int
    rows: int
    stored: str | None
    whole: bool


@frozen(kw_only=True)
class Place:
    """A matrix that could be packed: ``name`` of its module in the model and of the parameter.
    ``alike``: all of it as one part, as it is one operand (the experts of a layer).
    """

    module: str
    parameter: str
    rows: int
    cols: int
    pieces: tuple[Piece, ...]
    alike: bool = False


@frozen(kw_only=True, eq=False)
class Packed:
    """A matrix that will be held packed, and the weights of the checkpoint that it is made of."""

    name: str
    module: nn.Module
    parameter: str
    form: PackedForm
    weights: Mapping[str, str]
    """Name -> which part of it goes where, spelled."""


class Quantization(ABC):
    """Packs the matrices of one model. Built in the worker, once; ``dtype`` is that of what is not
    packed.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype

    @abstractmethod
    def create(self, place: Place) -> PackedForm | None:
        """Return the form in which a matrix is to be held; None: as numbers. No memory is taken
        yet. Raises UnsupportedError for a matrix that must be packed and cannot be.
        """

    def hold(self, plan: Sequence[Packed], weights: Weights) -> Collection[str]:
        """Give every matrix of ``plan`` its memory, on the device that its numbers were to be on;
        return the names of the weights that are in it already. Overridden by what keeps packed
        weights.
        """
        for each in plan:
            device = each.module.get_parameter(each.parameter).device
            memory = torch.zeros(each.form.num_bytes, dtype=torch.uint8, device=device)
            hold_packed(each.module, each.parameter, each.form, memory)
        return ()

    def loaded(self, plan: Sequence[Packed]) -> None:
        """Take note that every matrix of ``plan`` is filled; nothing is to be done by itself."""
        del plan
