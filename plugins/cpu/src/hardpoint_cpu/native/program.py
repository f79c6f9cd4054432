"""A lowered model with a team of threads: runs a step's tokens to the logits of its last ones.

Nothing of torch computes within a step. One step runs at a time in a process, whatever engines it
has: they have the same cores.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import torch
from hardpoint.errors import CancelledStepError, HardpointError
from hardpoint_runtime.attention.scaled import head_size
from hardpoint_runtime.graphs.programs import StepProgram

from hardpoint_cpu.native import library as native
from hardpoint_cpu.native.lowered import ATTEND, CACHED, Clear, Lowered, Outside, Pause, Sum
from hardpoint_cpu.native.lowering import ATTENDED, STREAM, lower
from hardpoint_cpu.native.watch import Watch

if TYPE_CHECKING:
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.memory.kv_cache import LayerCache
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.language_model import Carried

    from hardpoint_cpu.model_runner import CpuModelRunner

_logger = logging.getLogger("hardpoint.worker")

PATIENCE = 0.1
"""Seconds that one call may take, about: the driver can end a step between two calls."""

LONG = 0.3
"""Seconds from which a single operation is ended in the midst of it, if the driver wants that."""
UNWATCHED = nullcontext()
SLOW_BYTES = 4e9
SLOW_PRODUCTS = 1e10
"""Bytes and multiplications in a second of a slow machine, to guess how long layers take."""


class Program(StepProgram):
    """One runner's program. Used on the worker's thread, closed with the runner.

    ``most_tokens`` and ``most_rows``: of a step. ``cancelled``: whether the driver has ended the
    step. ``best``: where the greatest logits of the last step are, as :meth:`choose` finds them, if
    nobody wants more (:meth:`expect`); those logits are not written until :meth:`finish`.
    """

    @classmethod
    def of(cls, runner: TorchModelRunner, level: str) -> Self:
        """Lower the runner's model for instructions of a level (``auto``: the fastest), on as many
        threads as torch has.
        """
        most_tokens, most_rows = cast("CpuModelRunner", runner).most
        caches = {} if runner.kv_cache is None else runner.kv_cache.layers
        program = cls(
            lower(runner),
            level=native.availability().best if level == "auto" else level,
            threads=torch.get_num_threads(),
            cache=next(iter(caches.values())),
            most_tokens=most_tokens,
            most_rows=most_rows,
            dtype=runner.dtype,
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
        cache: LayerCache,
        most_tokens: int,
        most_rows: int,
        dtype: torch.dtype,
        cancelled: Callable[[], bool],
    ) -> None:
        self.level, self.threads = level, threads
        self.most_tokens = most_tokens
        self.positions = lowered.positions
        self._lowered = lowered
        self._dtype = dtype
        self._cancelled = cancelled
        self._costs = lowered.costs()
        self._cost, self._greatest = sum(self._costs), max(self._costs)
        self._library = native.load()
        blocks, block_size, kv_heads, _ = cache.key.shape
        columns = (ctypes.c_int64 * len(lowered.columns))(*lowered.columns)
        shape = native.Shape(
            most_tokens, most_rows, lowered.vocabulary, lowered.positions, blocks, block_size,
            lowered.heads, kv_heads, head_size(cache.key), CACHED[cache.key.dtype],
            len(lowered.columns), columns,
        )  # fmt: skip
        ops = lowered.as_array()
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
        self._end.atexit = False  # a step that was left behind may still compute then
        self._watch = Watch(lambda: self._cancelled())  # noqa: PLW0108 - that of now
        self._library.hp_program_watch(self._handle, self._watch.address)
        # Pages of rows that no step has are never touched.
        self.logits = torch.from_numpy(np.zeros((most_rows, lowered.vocabulary), np.float32))
        self._only_best = False
        self.best: np.ndarray | None = None
        self._unfinished: native.Step | None = None
        self._first_rows: dict[int, torch.Tensor] = {}
        self._views: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """End the threads and give the buffers back."""
        self._views.clear()
        self._first_rows.clear()
        self._end()

    def expect(
        self, *, only_best: bool, prepared: tuple[np.ndarray, native.Step] | None = None
    ) -> None:
        """Say before a step what of its logits is wanted; forgets the last step. ``prepared``: what
        :meth:`want_best` returned for this step.
        """
        self._only_best = only_best
        self.best, self._unfinished = prepared or (None, None)

    def run(
        self, inputs: BatchInputs, carried: Carried | None = None
    ) -> torch.Tensor | Carried | None:
        """Compute a step; see :class:`StepProgram`. A driver that ends it is heard soon.

        Raises HardpointError for inputs that name a token, position or block which there is not.
        """
        lowered = self._lowered
        token_ids, outside = self._own_tokens(inputs.token_ids)
        arrays = [
            np.ascontiguousarray(array, dtype=kind)
            for array, kind in (
                (token_ids, np.int64),
                (inputs.positions, np.int64),
                (inputs.cache_slots[0], np.int64),
                (inputs.logits_rows, np.int64),
                (inputs.query_start, np.int32),
                (inputs.block_tables[0], np.int32),
            )
        ]
        tokens, rows = len(arrays[0]), len(arrays[3])
        step = self.step(arrays, len(inputs.req_ids), rows)
        if self._only_best and rows and lowered.gathers is None:
            self.expect(only_best=True, prepared=self.want_best(step, np.empty(rows, np.int64)))
        if carried is not None:
            stream = self._buffer(STREAM, tokens)
            stream.copy_(carried["hidden_states"]).add_(carried["residual"])
        self.compute(step, int(inputs.positions.sum()) + tokens, outside)
        if not lowered.has_logits:
            stream = self._buffer(STREAM, tokens).to(self._dtype, copy=True)
            return {"hidden_states": stream, "residual": torch.zeros_like(stream)}
        logits = self.logits_of(rows)
        if lowered.gathers is not None:
            group, sizes = lowered.gathers
            logits = group.all_gather(logits, sizes, -1)
        return logits if rows else None

    def step(self, arrays: Sequence[np.ndarray], requests: int, rows: int) -> native.Step:
        """Return a step of so many ``requests`` over ``arrays``, as the library takes them: token
        ids, positions, cache slots, places of the ``rows`` that are wanted, starts of requests,
        block table. It holds them. All logits are written. ``at_once``: see :meth:`_at_once`.
        """
        made = native.Step(
            len(arrays[0]), requests, rows, arrays[5].shape[1],
            *(array.ctypes.data for array in arrays), self.logits.data_ptr(), None,
        )  # fmt: skip
        made.held = tuple(arrays)
        made.at_once = self._at_once(len(arrays[0]))
        return made

    @staticmethod
    def want_best(step: native.Step, best: np.ndarray) -> tuple[np.ndarray, native.Step]:
        """Have a step write the token of the greatest logit of each row to ``best``, int64 [m], and
        no logits until :meth:`finish`. Return what :meth:`expect` takes.
        """
        step.logits, step.best = None, best.ctypes.data
        return best, step

    def logits_of(self, rows: int) -> torch.Tensor:
        """Return the first rows of logits; the same tensor each time."""
        if rows not in self._first_rows:
            self._first_rows[rows] = self.logits[:rows]
        return self._first_rows[rows]

    @property
    def whole(self) -> bool:
        """Whether it computes from tokens to logits by itself, without pauses for other ranks."""
        lowered = self._lowered
        alone = lowered.embeds_all and lowered.gathers is None and not lowered.pauses
        return alone and lowered.embeds and lowered.has_logits

    def compute(self, step: native.Step, seen: int, outside: np.ndarray | None = None) -> None:
        """Run all operations of a step, whose tokens attend to ``seen`` positions in all. A driver
        that ends it is heard between two calls, and within one that may take long.

        Raises CancelledStepError, and HardpointError for inputs out of range.
        """
        if seen <= step.at_once:
            self._call(step, 0, len(self._costs), UNWATCHED)
            return
        lowered, tokens, rows = self._lowered, step.tokens, step.rows
        watch = self._watch if self._takes_long(tokens, seen) else UNWATCHED
        for first, last in self._calls(tokens, seen):
            self._call(step, first, last, watch)
            for pause in lowered.pauses.get(last, ()):
                self._do(pause, rows if getattr(pause, "picked", False) else tokens, outside)

    def _call(
        self, step: native.Step, first: int, last: int, watch: AbstractContextManager[object]
    ) -> None:
        """Run the operations [first, last) of a step."""
        if self._cancelled():
            raise CancelledStepError("a step was ended by the driver between operations")
        with watch:
            wrong = self._library.hp_program_run(self._handle, ctypes.byref(step), first, last)
        if wrong == native.ENDED:
            raise CancelledStepError("a step was ended by the driver within an operation")
        if wrong:
            raise HardpointError(
                f"a step of {step.tokens} tokens was given to the native program with "
                f"{native.STEP_FIELDS[wrong - 1]} out of range"
            )

    def _own_tokens(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of tokens in the embedding that this shard has, and which of them others
        have.
        """
        lowered = self._lowered
        if not lowered.embeds:
            return np.zeros_like(token_ids), None
        if lowered.embeds_all:
            return token_ids, None
        places = token_ids - lowered.first_token
        outside = (places < 0) | (places >= lowered.vocabulary)
        return np.where(outside, 0, places), outside

    def _do(self, pause: Pause, rows: int, outside: np.ndarray | None) -> None:
        """Do what a step pauses for."""
        here = self._buffer(pause.buffer, rows)
        if isinstance(pause, Clear):
            here.zero_()
        elif isinstance(pause, Outside):
            if outside is not None:
                here[torch.from_numpy(outside)] = 0
        elif isinstance(pause, Sum):
            total = here if pause.group is None else pause.group.all_reduce(here)
            if pause.bias is not None:
                total = total + pause.bias
            if pause.target is None:
                here.copy_(total)
            else:
                self._buffer(pause.target, rows).add_(total)

    def _buffer(self, index: int, rows: int) -> torch.Tensor:
        """Return the first rows of a buffer, as float32 [rows, columns]."""
        if index not in self._views:
            count = self.most_tokens * self._lowered.columns[index]
            place = self._library.hp_program_buffer(self._handle, index)
            memory = (ctypes.c_float * count).from_address(place)
            flat = torch.from_numpy(np.ctypeslib.as_array(memory))
            self._views[index] = flat.view(self.most_tokens, -1)
        return self._views[index][:rows]

    def finish(self) -> None:
        """Write the logits of a step whose best tokens alone were computed."""
        if self.best is None or self._unfinished is None:
            return
        step = self._unfinished
        step.logits, step.best = self.logits.data_ptr(), None
        last = len(self._lowered.ops)
        self._library.hp_program_run(self._handle, ctypes.byref(step), last - 2, last)
        self.best = self._unfinished = None

    def choose(self, logits: torch.Tensor, wishes: ctypes.Array[native.Wish]) -> list[int]:
        """Return the token of each row of ``logits``, float32 [m, V] in one piece: the greatest,
        the first of equal ones, or one drawn; -1 for a row with NaN, or whose greatest is not
        finite, -2 where only the reference can tell.
        """
        rows, count = logits.shape
        tokens = (ctypes.c_int64 * rows)()
        self._library.hp_program_choose(
            self._handle, logits.data_ptr(), rows, count, wishes, tokens
        )
        return list(tokens)

    def _paces(self, tokens: int, seen: int) -> tuple[float, float]:
        """Return for how many seconds a slow machine attends in a layer, and what it computes with
        a byte of weights.
        """
        attention = 2 * seen * self._lowered.columns[ATTENDED] / SLOW_PRODUCTS
        return attention, max(1 / SLOW_BYTES, tokens / 4 / SLOW_PRODUCTS)

    def _takes_long(self, tokens: int, seen: int) -> bool:
        """Whether a single operation may take longer than a driver should wait."""
        attention, per_byte = self._paces(tokens, seen)
        return max(attention, self._greatest * per_byte) > LONG

    def _at_once(self, tokens: int) -> int:
        """Return how many positions ``tokens`` may attend to in all, for their step to be one call
        that is too short to be ended within; -1 if it never is.
        """
        lowered = self._lowered
        attention, per_byte = self._paces(tokens, 1)
        left = min(PATIENCE, LONG) - max(self._cost, self._greatest) * per_byte
        if lowered.pauses or left <= 0:
            return -1
        return int(left / (attention * max(1, len(lowered.ends)))) - 1

    def _calls(self, tokens: int, seen: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the operations [first, last) of each call: as many as :data:`PATIENCE`, up to a
        pause. ``seen``: the positions that all tokens attend to.
        """
        lowered, last = self._lowered, len(self._costs)
        attention, per_byte = self._paces(tokens, seen)
        if not lowered.pauses and len(lowered.ends) * attention + self._cost * per_byte < PATIENCE:
            yield 0, last
            return
        first, seconds = 0, 0.0
        for place, cost in enumerate(self._costs, 1):
            seconds += cost * per_byte
            if lowered.ops[place - 1].kind == ATTEND:
                seconds += attention
            if seconds >= PATIENCE or place == last or place in lowered.pauses:
                yield first, place
                first, seconds = place, 0.0
