"""The worker's copy of the requests: a slot for life each, fixed arrays, kept current by the plans.

The driver alone holds what a request is. A plan is checked as a whole before anything but the
finished and the preempted changes, so one that is refused leaves no trace. Slots never move: the
order of a batch is an index made for each step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from hardpoint.messages import MessageError
from numpy.typing import NDArray

from hardpoint_tpu.request_columns import SAMPLING_COLUMNS

if TYPE_CHECKING:
    from hardpoint.messages import NewRequestData, SchedulerOutput
    from hardpoint.sampling_params import SamplingParams

Ints = NDArray[np.int32]
NULL_BLOCK = 0


class BlockTableError(MessageError):
    """A plan gives a request blocks that it cannot have; names the request and the figures."""


@define(eq=False)
class RequestState:
    """What a request has beside its columns. ``preempted``: its blocks are lost and must be
    replaced before it runs again.
    """

    req_id: str
    slot: int
    sampling: SamplingParams
    seed: int
    preempted: bool = False


@define
class _Change:
    """What a plan makes of one running request."""

    state: RequestState
    num_computed: int
    blocks: Sequence[int]
    resumed: bool
    tokens: Sequence[int] | None
    more: Sequence[int]
    num_tokens: int


class Requests:
    """Every request that this worker knows, by id, in arrays of ``capacity`` slots, which grow.

    ``columns`` are one value a slot: ``num_prompt``, ``num_tokens`` (prompt and output),
    ``num_computed``, ``num_blocks``, and the sampling parameters. ``tokens`` int32 [capacity,
    max_model_len]; ``blocks`` int32 [capacity, width], the null block where there is none.
    """

    def __init__(
        self, *, capacity: int, max_model_len: int, block_size: int, width: int, num_blocks: int
    ) -> None:
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.columns: dict[str, NDArray[Any]] = {
            name: np.zeros(capacity, np.int32)
            for name in ("num_prompt", "num_tokens", "num_computed", "num_blocks")
        }
        for column in SAMPLING_COLUMNS:
            self.columns[column.name] = np.full(capacity, column.default, column.dtype)
        self.tokens: Ints = np.zeros((capacity, max_model_len), np.int32)
        self.blocks: Ints = np.full((capacity, width), NULL_BLOCK, np.int32)
        self._free = list(range(capacity))
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._states

    def __getitem__(self, req_id: str) -> RequestState:
        return self._states[req_id]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every known id."""
        return tuple(self._states)

    def slots(self, req_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the slots of known requests."""
        return np.asarray([self._states[req_id].slot for req_id in req_ids], np.int64)

    def known(self, req_id: str) -> Ints:
        """Return a view of a request's token ids, prompt then output."""
        slot = self._states[req_id].slot
        return self.tokens[slot, : self._count("num_tokens", slot)]

    def num_prompt(self, req_id: str) -> int:
        """Return how many of them are the prompt."""
        return self._count("num_prompt", self._states[req_id].slot)

    def apply(self, plan: SchedulerOutput) -> None:
        """Bring the requests up to ``plan``. Raises MessageError for one that contradicts itself or
        what is known, when only the finished and preempted have changed.
        """
        plan.check()
        self._forget(plan.finished)
        self._park(plan.preempted)
        for request in plan.new:
            self._check_new(request, plan.num_tokens[request.req_id])
        changes = [
            self._change(plan, index, plan.num_tokens[req_id])
            for index, req_id in enumerate(plan.running.req_ids)
        ]
        for request in plan.new:
            self._add(request)
        for change in changes:
            self._adopt(change)

    def append_token(self, req_id: str, token: int) -> None:
        """Add a chosen token to what is known; at the longest length none follows, so it is not
        kept.
        """
        slot = self._states[req_id].slot
        count = self._count("num_tokens", slot)
        if count < self.max_model_len:
            self.tokens[slot, count] = token
            self.columns["num_tokens"][slot] = count + 1

    def due(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return bool [n]: after ``counts`` more tokens everything known of the request is in the
        cache, so its next token can be chosen. Unfinished prompts are not sampled at all.
        """
        after = self.columns["num_computed"][slots] + counts
        complete: NDArray[np.bool_] = after >= self.columns["num_tokens"][slots]
        return complete

    # Changes.

    def _forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            state = self._states.pop(req_id, None)  # one that never arrived is no error
            if state is not None:
                self._clear(state.slot)
                heapq.heappush(self._free, state.slot)

    def _clear(self, slot: int) -> None:
        for name, values in self.columns.items():
            default = next((c.default for c in SAMPLING_COLUMNS if c.name == name), 0)
            values[slot] = default
        self.tokens[slot] = 0
        self.blocks[slot] = NULL_BLOCK

    def _park(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            state = self._states.get(req_id)
            if state is not None:
                state.preempted = True
                self._set_blocks(state.slot, 0, ())

    def _add(self, request: NewRequestData) -> None:
        if not self._free:
            self._grow()
        slot = heapq.heappop(self._free)
        known = request.prefill_tokens or request.prompt
        self.tokens[slot, : len(known)] = known
        self.columns["num_prompt"][slot] = len(request.prompt)
        self.columns["num_tokens"][slot] = len(known)
        self.columns["num_computed"][slot] = request.num_computed
        for column in SAMPLING_COLUMNS:
            self.columns[column.name][slot] = column.read(request.sampling)
        self._set_blocks(slot, 0, request.block_ids[0])
        self._states[request.req_id] = RequestState(
            req_id=request.req_id,
            slot=slot,
            sampling=request.sampling,
            seed=request.sampling.seed or 0,
        )

    def _adopt(self, change: _Change) -> None:
        slot = change.state.slot
        before = self._count("num_tokens", slot)
        if change.tokens is not None:
            self.tokens[slot, : len(change.tokens)] = change.tokens
            before = max(before, len(change.tokens))
        elif change.more:
            self.tokens[slot, before : before + len(change.more)] = change.more
            before += len(change.more)
        self.tokens[slot, change.num_tokens : before] = 0
        self.columns["num_tokens"][slot] = change.num_tokens
        self.columns["num_computed"][slot] = change.num_computed
        start = 0 if change.resumed else self._count("num_blocks", slot)
        if change.resumed or change.blocks:
            self._set_blocks(slot, start, change.blocks)
        change.state.preempted = change.state.preempted and not change.resumed

    def _set_blocks(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        """Keep the first ``start`` blocks of a slot and put ``blocks`` behind them."""
        end = start + len(blocks)
        self.blocks[slot, start:end] = blocks
        self.blocks[slot, end:] = NULL_BLOCK
        self.columns["num_blocks"][slot] = end

    def _grow(self) -> None:
        """Double the slots: preempted requests keep theirs while others run."""
        count = len(self.tokens)
        self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.blocks = np.concatenate((self.blocks, np.full_like(self.blocks, NULL_BLOCK)))
        for name, values in self.columns.items():
            self.columns[name] = np.concatenate((values, np.zeros_like(values)))
        for slot in range(count, 2 * count):
            self._clear(slot)
            heapq.heappush(self._free, slot)

    def _count(self, name: str, slot: int) -> int:
        return int(self.columns[name][slot])

    # Checks.

    def _check_new(self, request: NewRequestData, count: int) -> None:
        req_id = request.req_id
        known = request.prefill_tokens or request.prompt
        if req_id in self._states:
            raise MessageError(f"request {req_id!r} is announced as new, but is known here")
        request.check()
        if len(request.block_ids) != 1:
            raise BlockTableError(
                f"request {req_id!r} has {len(request.block_ids)} block tables, there is one group"
            )
        self._check_span(req_id, 0, request.block_ids[0], request.num_computed + count, len(known))

    def _change(self, plan: SchedulerOutput, index: int, count: int) -> _Change:
        running = plan.running
        req_id = running.req_ids[index]
        state = self._states.get(req_id)
        if state is None:
            raise MessageError(f"request {req_id!r} is announced as running, but is unknown here")
        resumed = req_id in running.resumed
        if state.preempted and not resumed:
            raise MessageError(
                f"request {req_id!r} has lost its blocks; to run again it must be in resumed"
            )
        new_blocks = running.new_blocks[index]
        if new_blocks is not None and len(new_blocks) != 1:
            raise BlockTableError(
                f"request {req_id!r} has {len(new_blocks)} block tables, there is one group"
            )
        prompt = self._count("num_prompt", state.slot)
        tokens = running.all_tokens.get(req_id)
        known = len(tokens) if tokens is not None else self._count("num_tokens", state.slot)
        more = running.told(index, known - prompt) if tokens is None else ()
        known += len(more)
        if running.num_output:
            wanted = prompt + running.num_output[index]
            if known < wanted:
                raise MessageError(
                    f"request {req_id!r}: the plan counts {wanted} tokens, only {known} are known"
                )
            known = wanted
        change = _Change(
            state=state,
            num_computed=running.num_computed[index],
            blocks=new_blocks[0] if new_blocks else (),
            resumed=resumed,
            tokens=tokens,
            more=more,
            num_tokens=known,
        )
        held = 0 if resumed else self._count("num_blocks", state.slot)
        self._check_span(req_id, held, change.blocks, change.num_computed + count, known)
        return change

    def _check_span(
        self, req_id: str, held: int, blocks: Sequence[int], end: int, known: int
    ) -> None:
        """Refuse to compute positions below ``end`` unless each has a known token and a block."""
        if known > self.max_model_len:
            raise MessageError(
                f"request {req_id!r} has {known} tokens, the longest here is {self.max_model_len}"
            )
        if end > known:
            raise MessageError(
                f"request {req_id!r}: {end} positions are to be computed, only {known} tokens are "
                "known"
            )
        width = self.blocks.shape[1]
        if held + len(blocks) > width:
            raise BlockTableError(
                f"request {req_id!r}: {held} blocks and {len(blocks)} more, a table has {width}"
            )
        for block in blocks:
            if not NULL_BLOCK < block < self.num_blocks:
                raise BlockTableError(
                    f"request {req_id!r}: block {block} is not in [1, {self.num_blocks})"
                )
        if (held + len(blocks)) * self.block_size < end:
            raise BlockTableError(
                f"request {req_id!r}: {end} positions need more than its {held + len(blocks)} "
                f"blocks of {self.block_size} tokens"
            )
