"""The cpu's model runner: steps replay a native program where the model can be one, else they run
through torch.

Both use the same weights and the same KV cache, so that one step may run this way and the next
that. Torch's way is the reference.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from hardpoint.errors import UnsupportedError
from hardpoint_runtime.attention.scaled import with_scales
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.programs import ProgramGraphs
from hardpoint_runtime.model_runner import TorchModelRunner

from hardpoint_cpu import large_pages
from hardpoint_cpu.native import library
from hardpoint_cpu.native.expectations import slow_way
from hardpoint_cpu.native.lowering import program_bytes
from hardpoint_cpu.native.program import Program
from hardpoint_cpu.native.refusals import refusal
from hardpoint_cpu.native.sampler import ProgramSampler
from hardpoint_cpu.quantization import NativePacking
from hardpoint_cpu.steady_steps import SteadySteps

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from hardpoint.kv_cache import KVCacheSpec
    from hardpoint.messages import ModelRunnerOutput, SchedulerOutput, StepTicket
    from hardpoint.records import LoadReport
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.quantization import Quantization
    from hardpoint_runtime.sampling.sampler import Sampler

    from hardpoint_cpu.platform import CpuPlatform

_logger = logging.getLogger("hardpoint.worker")


class CpuModelRunner(TorchModelRunner):
    """Executes steps of one model on the host's processors."""

    _inputs: BatchInputs | None = None
    _steady: SteadySteps | None = None

    @property
    def program(self) -> Program | None:
        """The native program; None before warming up, and where there is none."""
        program = self.graphs.program if isinstance(self.graphs, ProgramGraphs) else None
        return program if isinstance(program, Program) else None

    def make_sampler(self) -> Sampler:
        """Choose the best tokens natively where nobody wants more."""
        return ProgramSampler(self, super().make_sampler())

    def make_quantization(self, model: LanguageModel) -> Quantization | None:
        """Pack weights as the key ``quantization`` says; if it and ``dtype`` are left open, hold
        what a file has in blocks as it is, where a program computes with that.
        """
        named = super().make_quantization(model)
        if named is None and self._packs_blocks(model):
            return NativePacking(self.config, self.dtype)
        if named is None:
            large_pages.hold(model)
        return named

    def _packs_blocks(self, model: LanguageModel) -> bool:
        """Whether what a file has in blocks stays so: a program computes with it, and the key
        ``dtype`` does not say otherwise.
        """
        options = cast("CpuPlatform", self.platform).options
        if self.config.is_explicit("dtype") or self.description.format != "gguf":
            return False
        if options.native == "off" or library.availability().reason:
            return False
        self.model = model  # by which it is judged
        return refusal(self) is None

    def load_model(self) -> LoadReport:
        """Load the model, then plan its program, unless that is not wanted or cannot be: the log
        says why. Raises UnsupportedError where one is asked for by ``plugins.cpu.native = "on"`` or
        ``batch_invariant``.
        """
        report = super().load_model()
        native = cast("CpuPlatform", self.platform).options.native
        if native == "off":
            return report
        reason = library.availability().reason or refusal(self)
        if reason is None:
            most_tokens, most_rows = self.most
            self.graph_plan = GraphPlan.of_program(
                max_num_seqs=most_rows, max_num_batched_tokens=most_tokens
            )
        elif native == "on" or self.config.model.batch_invariant:
            asked = "plugins.cpu.native = 'on'" if native == "on" else "batch_invariant"
            raise UnsupportedError(asked, "this model on the cpu platform", reason=reason)
        else:
            self._tell(reason)
        return report

    def _tell(self, reason: str) -> None:
        """Say once in a run that steps are slower than they could be; no news where it was asked
        for, or where another rank says it.
        """
        known = self.config.graph.graph_mode == "none" or self.context.rank
        _logger.log(logging.INFO if known else logging.WARNING, "%s", slow_way(reason))

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step; see :class:`TorchModelRunner`. One that follows the last in the same
        requests is not built anew.
        """
        steady, self._steady = self._steady, None
        output: ModelRunnerOutput | StepTicket
        if steady is not None and steady.continues(scheduler_output):
            output = steady.run(scheduler_output)
        else:
            self._inputs = None
            output = super().execute_model(scheduler_output)
            inputs, self._inputs = self._inputs, None
            steady = inputs and SteadySteps.after(self, scheduler_output, output, inputs)
        self._steady = steady
        return output

    def close(self) -> None:
        """Drop the model, the cache and the requests."""
        self._steady = None
        super().close()

    def prepare(self, plan: SchedulerOutput) -> BatchInputs:
        """Return the step's inputs, in batch order."""
        self._inputs = inputs = super().prepare(plan)
        return inputs

    def forward(self, inputs: BatchInputs, plan: SchedulerOutput) -> torch.Tensor | None:
        """Run a step; its logits are not even written where only the best tokens are wanted."""
        if (program := self.program) is not None:
            program.expect(only_best=not plan.defer_sampling and self._wants_only_best(inputs))
        return super().forward(inputs, plan)

    def _wants_only_best(self, inputs: BatchInputs) -> bool:
        """Whether every row that is sampled is greedy and asks for nothing else."""
        if self.requests is None or (self.processors is not None and self.processors.changing):
            return False
        columns, slots = self.requests.columns, inputs.request_slots[inputs.sampled_rows]
        wishes = (columns.gather(name, slots) for name in ("temperature", "features"))
        return not any(wish.any() for wish in wishes)

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """See :class:`TorchModelRunner`; a head of int8 has its scale behind it."""
        found = super().get_kv_cache_spec()
        return {name: with_scales(spec) for name, spec in found.items()}

    def program_bytes(self) -> int:
        """Return what a program takes beside weights and KV cache. For the memory budget."""
        return program_bytes(self) if self.graph_plan.any_shape else 0

    @property
    def most(self) -> tuple[int, int]:
        """The most tokens of a step, and the most rows that are sampled."""
        scheduler = self.config.scheduler
        rows = scheduler.max_num_seqs or 1
        return max(scheduler.max_num_batched_tokens or 1, rows), rows
