"""The parts that decoder models share. Each holds its weights and calls named operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import nn

from hardpoint_runtime.operations import Operations


@frozen(kw_only=True, eq=False)
class Slot:
    """Where one weight of a checkpoint goes: ``parameter[start : start + shape[0]]``."""

    module: nn.Module
    parameter: str
    start: int
    shape: tuple[int, ...]

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy ``tensor`` there, converting its dtype and moving it to the parameter's device."""
        parameter = self.module.get_parameter(self.parameter)
        with torch.no_grad():
            parameter.narrow(0, self.start, self.shape[0]).copy_(tensor)


class Projection(nn.Module):
    """One or several linear layers of equal input as one: their outputs side by side.

    ``parts`` maps each layer's name in the checkpoint to its number of outputs.
    """

    def __init__(
        self, inputs: int, parts: Mapping[str, int], *, bias: bool, operations: Operations
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        outputs = sum(self.parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self._linear = operations.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, outputs] of ``x`` [T, inputs]."""
        return self._linear(x, self.weight, self.bias)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        found = {}
        start = 0
        for name, outputs in self.parts.items():
            for parameter in ("weight", "bias") if self.bias is not None else ("weight",):
                shape = (outputs, *self.get_parameter(parameter).shape[1:])
                found[f"{prefix}{name}.{parameter}"] = Slot(
                    module=self, parameter=parameter, start=start, shape=shape
                )
            start += outputs
        return found


class Norm(nn.Module):
    """The scale of an RMS norm, and its epsilon."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def slots(self, name: str) -> dict[str, Slot]:
        """Return the checkpoint's name of the scale."""
        return {f"{name}.weight": whole(self)}


class Embedding(nn.Module):
    """Token embeddings [V, H], which may serve as the output projection too."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)


def whole(module: nn.Module) -> Slot:
    """Return the slot of all of ``module.weight``."""
    shape = tuple(module.get_parameter("weight").shape)
    return Slot(module=module, parameter="weight", start=0, shape=shape)


def merged(parts: Sequence[Mapping[str, Slot]]) -> dict[str, Slot]:
    """Return the union of ``parts``."""
    return {name: slot for part in parts for name, slot in part.items()}
