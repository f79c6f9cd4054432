"""A mixture of experts as a layer: the router, and the experts' weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from hardpoint.checkpoints.decoder import ExpertsConfig
from torch import nn

from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models.layers import Projection, Slot
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import Seat
from hardpoint_runtime.quantization.packed_form import form_of


class Experts(nn.Module):
    """The mixture of one layer; of each expert a tensor shard has some inner columns.

    ``gate_up`` has the rows of all experts below each other: of each first its gate's, then its
    other inner columns'; ``down`` likewise its H outputs. Held packed, each is so as a whole.
    """

    packable: ClassVar[tuple[str, ...]] = ("gate_up", "down")
    packed_alike: ClassVar[bool] = True

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        activate: Callable[[torch.Tensor], torch.Tensor],
        operations: Operations,
        seat: Seat,
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden = hidden
        self.inner = seat.share(config.size)
        self.router = Projection(hidden, {"gate": config.count}, bias=False, operations=operations)
        rows = config.count * 2 * self.inner.size
        self.gate_up = nn.Parameter(torch.empty(rows, hidden), requires_grad=False)
        self.down = nn.Parameter(
            torch.empty(config.count * hidden, self.inner.size), requires_grad=False
        )
        self.shared = self.shared_router = None
        if config.shared is not None:
            self.shared_router = Projection(
                hidden, {"shared_expert_gate": 1}, bias=False, operations=operations
            )
            self.shared = SharedExpert(hidden, config, operations, seat)
        self._activate = activate
        self._experts = operations.experts
        self._group = None if self.inner.is_whole else seat.tensor

    def forward(self, x: torch.Tensor, step: ForwardContext) -> torch.Tensor:
        """Return [T, H] of ``x`` [T, H]."""
        likely = self.router(x).float().softmax(-1)
        weights, chosen = likely.topk(self.config.per_token, dim=-1)
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        used = None
        if any(form_of(self, name) is not None for name in self.packable):
            used, chosen = torch.unique(chosen, return_inverse=True)
        out = self._experts(
            x,
            self._stack("gate_up", 2 * self.inner.size, used),
            self._stack("down", self.hidden, used),
            chosen,
            weights.to(x.dtype),
            activate=self._activate,
            fixed=step.batch_key is not None,
        )
        out = out if self._group is None else self._group.all_reduce(out)
        if self.shared is None or self.shared_router is None:
            return out
        own: torch.Tensor = self.shared.down(self._activate(self.shared.gate_up(x)))
        return out + own * self.shared_router(x).sigmoid()

    def _stack(self, parameter: str, rows: int, used: torch.Tensor | None) -> torch.Tensor:
        """Return the matrices, ``rows`` each, of the experts ``used``, None: of all."""
        memory: torch.Tensor = self.get_parameter(parameter)
        form = form_of(self, parameter)
        if form is None:
            stack: torch.Tensor = memory.view(self.config.count, rows, -1)
            return stack if used is None else stack[used]
        experts = range(self.config.count) if used is None else used.tolist()
        found = [form.unpack(memory, expert * rows, rows) for expert in experts]
        return torch.stack(found).to(form.dtype)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``, the layer's."""
        config, size = self.config, self.inner.size
        prefix = f"{prefix}{config.block}."
        found = self.router.slots(prefix)
        if self.shared is not None and self.shared_router is not None:
            found.update(self.shared_router.slots(prefix))
            found.update(self.shared.slots(f"{prefix}shared_expert."))
        for expert in range(config.count):
            name = f"{prefix}experts.{expert}."
            first = expert * 2 * size
            found[f"{name}{config.gate}.weight"] = self._rows("gate_up", first)
            found[f"{name}{config.up}.weight"] = self._rows("gate_up", first + size)
            found[f"{name}{config.down}.weight"] = Slot(
                module=self,
                parameter="down",
                start=expert * self.hidden,
                shape=(self.hidden, config.size),
                held=() if self.inner.is_whole else (slice(0, self.hidden), self.inner.slice),
            )
        return found

    def _rows(self, parameter: str, start: int) -> Slot:
        return Slot(
            module=self,
            parameter=parameter,
            start=start,
            shape=(self.config.size, self.hidden),
            held=() if self.inner.is_whole else (self.inner.slice, slice(0, self.hidden)),
        )


class SharedExpert(nn.Module):
    """The expert of every token, as an MLP."""

    def __init__(
        self, hidden: int, config: ExpertsConfig, operations: Operations, seat: Seat
    ) -> None:
        super().__init__()
        inner = seat.share(config.shared or 0)
        self.gate_up = Projection(
            hidden, {config.gate: inner, config.up: inner}, bias=False, operations=operations
        )
        self.down = Projection(
            inner, {config.down: hidden}, bias=False, operations=operations, group=seat.tensor
        )

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Return the checkpoint's names below ``prefix``."""
        return {**self.gate_up.slots(prefix), **self.down.slots(prefix)}
