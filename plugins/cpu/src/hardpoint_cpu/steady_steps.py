"""Steps in which the same requests get a token each, as in the step before: nothing is built anew.

Of such a step only tokens, positions, lengths and cache slots are others than those of the last.
They are counted on in place, in the arrays that the native program reads; a plan that does not
follow, or a call in between that was no step, ends it, and the next step takes the long way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve
from hardpoint.messages import ModelRunnerOutput, StepTimings
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.programs import ProgramGraphs
from hardpoint_runtime.pooling import Pooled
from hardpoint_runtime.waiting_steps import WaitingStep

if TYPE_CHECKING:
    from hardpoint.messages import GraphStats, SchedulerOutput
    from hardpoint_runtime.batch.block_table import BlockTable
    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.batch.requests import Requests

    from hardpoint_cpu.model_runner import CpuModelRunner
    from hardpoint_cpu.native.program import Program


class SteadySteps:
    """The steps that follow one of single tokens. Owned by the runner, used on its thread.

    Make one by :meth:`after`. ``inputs`` are those of the step before, changed in place.
    """

    def __init__(
        self,
        runner: CpuModelRunner,
        program: Program,
        requests: Requests,
        inputs: BatchInputs,
        graphs: ProgramGraphs,
        stats: GraphStats,
    ) -> None:
        self._runner, self._program, self._requests = runner, program, requests
        self._graphs, self._stats, self._calls = graphs, stats, runner.other_calls
        self.ids, self._slots = inputs.req_ids, inputs.request_slots
        count = len(self.ids)
        self._ones, self._no_blocks = dict.fromkeys(self.ids, 1), (None,) * count
        columns, slots = requests.columns, self._slots
        tokens = columns["tokens"]
        self._computed, self._known = columns["num_computed"], columns["num_tokens"]
        self._tokens = tokens.reshape(-1)
        self._table: BlockTable = requests.block_tables.tables[0]
        self._rows = np.arange(count)
        self._blocks = np.ascontiguousarray(columns[f"blocks.{self._table.group}"][slots])
        # What grows by one in each step, so that it grows at once: positions, lengths with them,
        # cache slots, and where in all tokens the next one is kept.
        lengths = inputs.seq_lens[:count].astype(np.int64)
        self._counts = np.stack(
            (lengths - 1, lengths, lengths + 1, lengths, slots * tokens.shape[1] + lengths)
        )
        positions, self._lengths, self._told, cache_slots, self._places = self._counts
        self.inputs = inputs = evolve(
            inputs,
            token_ids=tokens[slots, lengths].astype(np.int64),
            positions=positions,
            seq_lens=self._lengths,
            cache_slots=(cache_slots,),
            block_tables=(self._blocks,),
        )
        self._beyond = 1 - columns["num_prompt"][slots].astype(np.int64)
        # How many steps until a request is as long as it may be, and until one enters a block.
        self._left = requests.max_model_len - int(lengths.max()) - 1
        self._within = 0
        self._seen = int(lengths.sum())
        arrays = (
            inputs.token_ids, positions, cache_slots,
            inputs.logits_rows.astype(np.int64), inputs.query_start.astype(np.int32), self._blocks,
        )  # fmt: skip
        self._step = program.step(arrays, count, count)
        asks = columns["features"][slots].any() or columns["temperature"][slots].any()
        processes = runner.processors is not None and runner.processors.begin(self.ids) is not None
        self._only_best = not (asks or processes)
        # The choices are the next step's tokens: they are written where it reads them.
        self._best = program.want_best(self._step, inputs.token_ids) if self._only_best else None

    @classmethod
    def after(
        cls, runner: CpuModelRunner, plan: SchedulerOutput, output: object, inputs: BatchInputs
    ) -> SteadySteps | None:
        """Return what serves the steps that follow ``plan`` in the same way; None if there is no
        such: it was not of one token for each of requests known before, or not the program's alone.
        """
        program, graphs, requests = runner.program, runner.graphs, runner.requests
        count = len(plan.running.req_ids)
        if plan.total_tokens != count or len(inputs.sampled_rows) != count or plan.new:
            return None
        if program is None or requests is None or not isinstance(graphs, ProgramGraphs):
            return None
        stats = output.graph_stats if isinstance(output, ModelRunnerOutput) else None
        if stats is None or stats.mode != GraphMode.FULL.name or not program.whole:
            return None
        if runner.other_calls is None or runner.timing or runner.line or requests.pooling:
            return None
        if len(inputs.block_tables) != 1 or requests.block_tables.tables[0].split != 1:
            return None
        return cls(runner, program, requests, inputs, graphs, stats)

    def continues(self, plan: SchedulerOutput) -> bool:
        """Whether a plan is of the next token of each of the requests, and of nothing else."""
        running = plan.running
        if running.req_ids != self.ids or plan.num_tokens != self._ones or self._left <= 0:
            return False
        if self._runner.other_calls != self._calls or plan.total_tokens != len(self.ids):
            return False
        if (
            plan.new or plan.finished or plan.preempted or plan.drafts or plan.defer_sampling
            or plan.blocks_to_zero or plan.block_copies or plan.extra
            or running.resumed or running.new_tokens or running.all_tokens
        ):  # fmt: skip
            return False
        lengths = self._lengths
        if running.num_computed != tuple(lengths.tolist()):
            return False
        if running.num_output and running.num_output != tuple((lengths + self._beyond).tolist()):
            return False
        return self._has_room(plan)

    def _has_room(self, plan: SchedulerOutput) -> bool:
        """Whether every request has a block for its next token, with those of the plan. Raises
        BlockTableError for blocks that there are not.
        """
        new = plan.running.new_blocks
        if new == self._no_blocks and self._within > 0:
            return True
        if len(new) != len(self.ids):
            return False
        tables = self._requests.block_tables
        for req_id, blocks in zip(self.ids, new, strict=True):
            if blocks is not None:
                tables.check(req_id, self._requests.slot_of(req_id), blocks)
        more = [0 if blocks is None else len(blocks[0]) for blocks in new]
        held = [self._table.count(slot) for slot in self._slots.tolist()]
        last = (self._lengths // self._table.block_size).tolist()
        return all(a + b > c for a, b, c in zip(held, more, last, strict=True))

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step that :meth:`continues`. Whatever it raises, this is not used again."""
        started = time.perf_counter()
        slots, program, token_ids = self._slots, self._program, self.inputs.token_ids
        if not self._only_best:
            token_ids[:] = self._tokens[self._places]
        self._count_on(plan)
        self._computed[slots] = self.inputs.positions
        program.expect(only_best=self._only_best, prepared=self._best)
        prepared = time.perf_counter()
        program.compute(self._step, self._seen)
        ran = time.perf_counter()
        self._graphs.counts.steps[GraphMode.FULL] += 1
        best = token_ids.tolist() if self._only_best else (-1,)
        if min(best) < 0:
            return self._finish(plan, prepared - started, ran - prepared)
        self._tokens[self._places] = token_ids
        self._known[slots] = self._told
        return ModelRunnerOutput(
            step_id=plan.step_id,
            generation=plan.generation,
            req_ids=self.ids,
            tokens=tuple(zip(best, strict=True)),
            timings=StepTimings(prepare=prepared - started, forward=ran - prepared),
            graph_stats=self._stats,
        )

    def _count_on(self, plan: SchedulerOutput) -> None:
        """Bring the inputs from the last step's to those of ``plan``."""
        self._counts += 1
        self._seen += len(self.ids)
        self._left -= 1
        self._within -= 1
        if plan.running.new_blocks != self._no_blocks:
            for row, blocks in enumerate(plan.running.new_blocks):
                if blocks is not None:
                    slot = int(self._slots[row])
                    self._requests.block_tables.append(slot, blocks)
                    count = self._table.count(slot)
                    self._blocks[row, :count] = self._table.row(slot)
        if self._within < 0:
            positions, size = self.inputs.positions, self._table.block_size
            places, inside = self._blocks[self._rows, positions // size], positions % size
            self.inputs.cache_slots[0][:] = places.astype(np.int64) * size + inside
            self._within = size - 1 - int(inside.max())

    def _finish(self, plan: SchedulerOutput, prepare: float, forward: float) -> ModelRunnerOutput:
        """Choose the tokens as in any other step."""
        if self._only_best:  # there is a row without numbers, and no token to go on with
            self._left = 0
        step = WaitingStep(
            step_id=plan.step_id,
            generation=plan.generation,
            inputs=self.inputs,
            logits=self._program.logits_of(len(self.ids)),
            pooled=Pooled(),
            graph_stats=self._stats,
            prepare=prepare,
            forward=forward,
        )
        return self._runner.finish(step, None)
