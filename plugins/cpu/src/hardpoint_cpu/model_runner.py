"""The cpu's model runner: steps as a native program where the model can be one, else through torch.

Both use the same weights and the same KV cache, so that one step may run this way and the next
that. Torch's way is the reference.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, cast

import torch
from hardpoint.errors import UnsupportedError
from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.identity import Identities
from hardpoint_runtime.model_runner import TorchModelRunner

from hardpoint_cpu.native import library
from hardpoint_cpu.native.lowering import buffer_columns, hooks_of, lower, refusal
from hardpoint_cpu.native.program import Program
from hardpoint_cpu.native.sampler import ProgramSampler

if TYPE_CHECKING:
    from hardpoint.messages import SchedulerOutput
    from hardpoint.records import WarmUpReport
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.batch.requests import Requests
    from hardpoint_runtime.sampling.sampler import Sampler

    from hardpoint_cpu.platform import CpuPlatform
    from hardpoint_cpu.settings import CpuSettings

_logger = logging.getLogger("hardpoint.worker")


class CpuModelRunner(TorchModelRunner):
    """Executes steps of one model on the host's processors.

    ``program``: the model as a native program, made while warming up; None: all steps run through
    torch, for the reason that the log tells once.
    """

    program: Program | None = None
    _told: frozenset[str] = frozenset()

    def make_sampler(self) -> Sampler:
        """Choose the best tokens natively where nobody wants more."""
        return ProgramSampler(self, super().make_sampler())

    def warm_up(self) -> WarmUpReport:
        """Warm up torch's way, then make the program."""
        report = super().warm_up()
        self.make_program()
        return report

    def make_program(self) -> None:
        """Lower the model, unless that is not wanted or cannot be. Called by :meth:`warm_up`, and
        again when what was lowered is no longer what there is. Raises UnsupportedError if
        ``plugins.cpu.native = "on"`` cannot be had.
        """
        self._drop_program()
        options = self._options
        if options.native == "off":
            return
        available = library.availability()
        reason = available.reason or refusal(self)
        if reason:
            if options.native == "on":
                raise UnsupportedError(
                    "plugins.cpu.native = 'on'", "this model on the cpu platform", reason=reason
                )
            self._tell(reason)
            return
        model, (most_tokens, most_rows) = self.get_model(), self._most
        caches = {} if self.kv_cache is None else self.kv_cache.layers
        level = available.best if options.native_level == "auto" else options.native_level
        self.program = Program(
            lower(self),
            level=level,
            threads=torch.get_num_threads(),
            vocabulary=self.description.vocab_size,
            heads=self.description.num_heads,
            cache=next(iter(caches.values())),
            most_tokens=most_tokens,
            most_rows=most_rows,
        )
        self._identities = Identities(
            {
                f"weight {prefix}.{name}": functools.partial(module._parameters.__getitem__, name)  # noqa: SLF001
                for prefix, module in model.named_modules()
                for name, held in module._parameters.items()  # noqa: SLF001
                if held is not None
            },
            model,
        )
        self._hooks = hooks_of(model)
        _logger.info(
            "steps run as a native program of %s instructions on %d threads",
            level, self.program.threads,
        )  # fmt: skip

    def program_bytes(self) -> int:
        """Return what a program takes beside weights and KV cache. For the memory budget."""
        if self._options.native == "off" or library.availability().reason or refusal(self):
            return 0
        tokens, rows = self._most
        description = self.description
        angles = self.max_model_len * description.head_size
        return 4 * (
            sum(buffer_columns(description)) * tokens + rows * description.vocab_size + angles
        )

    @property
    def _most(self) -> tuple[int, int]:
        """The most tokens of a step, and the most rows that are sampled."""
        scheduler = self.config.scheduler
        rows = scheduler.max_num_seqs or 1
        return max(scheduler.max_num_batched_tokens or 1, rows), rows

    def forward(self, inputs: BatchInputs, plan: SchedulerOutput) -> torch.Tensor | None:
        """Run the program, or torch's way where a step wants what the program does not give."""
        program = self._program_for(inputs)
        if program is None:
            return super().forward(inputs, plan)
        timing = self.timing and self.timing.measured(len(inputs.row_of_token))
        with timing or contextlib.nullcontext():
            logits = program.run(inputs, self.context.cancelled)
        return logits if len(logits) else None

    def update_max_model_len(self, max_model_len: int) -> None:
        """Adopt a longest length, and a program that knows its positions."""
        longer = max_model_len > self.max_model_len
        super().update_max_model_len(max_model_len)
        if self.program is not None and longer:
            self.make_program()

    def close(self) -> None:
        """End the program's threads, then drop the rest."""
        self._drop_program()
        super().close()

    def _program_for(self, inputs: BatchInputs) -> Program | None:
        if self.program is None or self.requests is None:
            return None
        reason = self._reason_against(self.requests, inputs, self.program)
        if reason is not None:
            self._tell(f"some steps, where {reason}")
            return None
        try:
            self._identities.check(self.get_model())
        except GraphBufferError as error:
            _logger.info("the native program is made anew: %s", error)
            self.make_program()
        return self.program

    def _reason_against(
        self, requests: Requests, inputs: BatchInputs, program: Program
    ) -> str | None:
        """Return what of a step the program does not give, None if it does it all."""
        if any(self._hooks):
            return "a module of the model has a hook"
        if self.prompt_logprobs.rows(requests, inputs):
            return "scores of prompts are asked for"
        if self.pooling.rows(requests, inputs):
            return "vectors are asked for"
        if inputs.num_tokens > program.most_tokens:
            return f"there are more than {program.most_tokens} tokens"
        return None

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told |= {reason}
            _logger.info("through torch instead of a native program: %s", reason)

    def _drop_program(self) -> None:
        if self.program is not None:
            self.program.close()
        self.program = None

    @property
    def _options(self) -> CpuSettings:
        return cast("CpuPlatform", self.platform).options
