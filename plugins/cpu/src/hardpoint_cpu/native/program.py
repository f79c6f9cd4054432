"""A lowered model with a team of threads: runs a step's tokens to the logits of its last ones.

Nothing of torch computes within a step. One step runs at a time in a process, whatever engines it
has: they have the same cores.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import torch
from hardpoint.errors import CancelledStepError, HardpointError
from hardpoint_runtime.graphs.programs import StepProgram

from hardpoint_cpu.native import library as native
from hardpoint_cpu.native.lowering import TYPES, Lowered, as_array, cost_per_layer, lower

if TYPE_CHECKING:
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.memory.kv_cache import LayerCache
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.language_model import Carried

    from hardpoint_cpu.model_runner import CpuModelRunner

_logger = logging.getLogger("hardpoint.worker")

PATIENCE = 0.1
"""Seconds that one call may take, about: the driver can end a step between two calls."""

SLOW_BYTES = 4e9
SLOW_PRODUCTS = 1e10
"""Bytes and multiplications in a second of a slow machine, to guess how long layers take."""


class Program(StepProgram):
    """One runner's program. Used on the worker's thread, closed with the runner.

    ``most_tokens`` and ``most_rows``: of a step. Its buffers take memory at once. ``cancelled``:
    whether the driver has ended the step.
    """

    @classmethod
    def of(cls, runner: TorchModelRunner, level: str) -> Self:
        """Lower the runner's model for instructions of a level (``auto``: the fastest), on as many
        threads as torch has.
        """
        lowered = lower(runner)
        most_tokens, most_rows = cast("CpuModelRunner", runner).most
        caches = {} if runner.kv_cache is None else runner.kv_cache.layers
        program = cls(
            lowered,
            level=native.availability().best if level == "auto" else level,
            threads=torch.get_num_threads(),
            vocabulary=runner.description.vocab_size,
            heads=runner.description.num_heads,
            cache=next(iter(caches.values())),
            most_tokens=most_tokens,
            most_rows=most_rows,
            cancelled=lambda: runner.context.cancelled(),  # noqa: PLW0108 - that of now
        )
        _logger.info(
            "steps run as a native program of %s instructions on %d threads",
            program.level, program.threads,
        )  # fmt: skip
        return program

    def __init__(
        self,
        lowered: Lowered,
        *,
        level: str,
        threads: int,
        vocabulary: int,
        heads: int,
        cache: LayerCache,
        most_tokens: int,
        most_rows: int,
        cancelled: Callable[[], bool],
    ) -> None:
        self.level, self.threads = level, threads
        self.most_tokens = most_tokens
        self.positions = lowered.positions
        self._cancelled = cancelled
        self._lowered = lowered
        self._costs = cost_per_layer(lowered)
        self._library = native.load()
        blocks, block_size, kv_heads, head = cache.key.shape
        columns = (ctypes.c_int64 * len(lowered.columns))(*lowered.columns)
        shape = native.Shape(
            most_tokens, most_rows, vocabulary, lowered.positions, blocks, block_size, heads,
            kv_heads, head, TYPES[cache.key.dtype], len(lowered.columns), columns,
        )  # fmt: skip
        ops = as_array(lowered)
        handle = self._library.hp_program_new(
            native.LEVELS.index(level), threads, ops, len(ops), ctypes.byref(shape)
        )
        if not handle:
            raise HardpointError(
                f"the native program of level {level} could not be made for {threads} threads and "
                f"{most_tokens} tokens a step: there is no memory for it, or no thread"
            )
        self._handle = ctypes.c_void_p(handle)
        self._end = weakref.finalize(self, self._library.hp_program_free, self._handle)
        self.logits = torch.zeros((most_rows, vocabulary), dtype=torch.float32)
        self._best = np.zeros(most_rows, dtype=np.int64)

    def close(self) -> None:
        """End the threads and give the buffers back."""
        self._end()

    def run(self, inputs: BatchInputs, carried: Carried | None = None) -> torch.Tensor | None:
        """Compute a step; see :class:`StepProgram`. A driver that ends it is heard between layers.

        Raises HardpointError for inputs that name a token, position or block which there is not.
        """
        arrays = [
            np.ascontiguousarray(array, dtype=kind)
            for array, kind in (
                (inputs.token_ids, np.int64),
                (inputs.positions, np.int64),
                (inputs.cache_slots[0], np.int64),
                (inputs.logits_rows, np.int64),
                (inputs.query_start, np.int32),
                (inputs.block_tables[0], np.int32),
            )
        ]
        tokens, rows = len(arrays[0]), len(arrays[3])
        step = native.Step(
            tokens, len(inputs.req_ids), rows, arrays[5].shape[1],
            *(array.ctypes.data for array in arrays), self.logits.data_ptr(),
        )  # fmt: skip
        for first, last in self._calls(tokens):
            if self._cancelled():
                raise CancelledStepError("a step was ended by the driver between layers")
            wrong = self._library.hp_program_run(self._handle, ctypes.byref(step), first, last)
            if wrong:
                raise HardpointError(
                    f"a step of {tokens} tokens was given to the native program with "
                    f"{native.STEP_FIELDS[wrong - 1]} out of range"
                )
        return self.logits[:rows] if rows else None

    def best(self, logits: torch.Tensor) -> list[int]:
        """Return the place of the greatest in each row of ``logits``, float32 [m, V] in one piece,
        the first of equal ones; -1 for a row with NaN, or whose greatest is not finite.
        """
        rows, count = logits.shape
        self._library.hp_program_best(
            self._handle, logits.data_ptr(), rows, count, self._best.ctypes.data
        )
        found: list[int] = self._best[:rows].tolist()
        return found

    def _calls(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the operations [first, last) of each call: as many layers as :data:`PATIENCE`."""
        first, seconds = 0, 0.0
        for end, size in zip(self._lowered.ends, self._costs, strict=True):
            seconds += max(size / SLOW_BYTES, size * tokens / 4 / SLOW_PRODUCTS)
            if seconds >= PATIENCE or end == self._lowered.ends[-1]:
                yield first, end
                first, seconds = end, 0.0
