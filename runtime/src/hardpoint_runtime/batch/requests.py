"""The worker's copy of the requests, kept current by the differences that each step brings.

The driver alone holds what a request is; this is a cache of it. A plan is checked as a whole before
anything is changed, so a plan that is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field
from hardpoint.logits_processor import AddedRequest
from hardpoint.messages import MessageError

from hardpoint_runtime.batch.changes import SlotChanges
from hardpoint_runtime.batch.columns import Array, Column, Columns
from hardpoint_runtime.sampling.kept import Kept

if TYPE_CHECKING:
    from hardpoint.adapters import LoRARequest, PromptAdapterRequest
    from hardpoint.logits_processor import RequestChanges
    from hardpoint.messages import BlockIds, Extra, Logprobs, NewRequestData, SchedulerOutput
    from hardpoint.pooling_params import PoolingParams
    from hardpoint.sampling_params import SamplingParams
    from torch import Tensor

    from hardpoint_runtime.batch.block_table import BlockTables

COUNTS = (
    Column(name="num_prompt", dtype="int32", default=0, pad=0, read=lambda new: len(new.prompt)),
    Column(name="num_tokens", dtype="int32", default=0, pad=0),
    Column(name="num_computed", dtype="int32", default=0, pad=0),
)
"""How many tokens the prompt has, how many are known (prompt + output), how many are in the KV
cache.
"""


def token_column(max_model_len: int) -> Column:
    """The column of known token ids, prompt then output."""
    return Column(name="tokens", dtype="int32", shape=(max_model_len,), default=0, pad=0)


@define(eq=False)
class RequestState:
    """What a request has beside its columns. ``slot`` is its row in every column, for life.

    ``seed`` is the key of its draws (never None here). ``preempted``: its blocks are lost and must
    be replaced before it runs again. ``prompt_scores``: prompt position -> its log-probabilities,
    until they are told. ``pooled``: what ``pooling`` has gathered of the positions below
    ``pooled_until``, float32 [H]. ``kept``: what the sampler keeps of it between steps.
    """

    req_id: str
    slot: int
    sampling: SamplingParams
    seed: int
    lora: LoRARequest | None
    prompt_adapter: PromptAdapterRequest | None
    extra: Extra
    preempted: bool = False
    prompt_scores: dict[int, Logprobs] = field(factory=dict)
    prompt_told: bool = False
    pooling: PoolingParams | None = None
    pooled: Tensor | None = None
    pooled_until: int = 0
    kept: Kept = field(factory=Kept)


class Requests:
    """Every request that this worker knows, by id.

    Owned by the model runner. ``columns`` and ``block_tables`` hold the arrays; read them through
    :meth:`slot_of`. ``pooling`` are the ids of those that want a vector.
    """

    def __init__(self, columns: Columns, block_tables: BlockTables, max_model_len: int) -> None:
        self.columns = columns
        self.block_tables = block_tables
        self.max_model_len = max_model_len
        self.pooling: set[str] = set()
        self._states: dict[str, RequestState] = {}
        self._changes: SlotChanges | None = None

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, req_id: str) -> RequestState:
        return self._states[req_id]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every known id."""
        return tuple(self._states)

    def slot_of(self, req_id: str) -> int:
        """The slot of a known request."""
        return self._states[req_id].slot

    def tokens(self, req_id: str) -> Array:
        """A view of a request's known token ids, prompt then output."""
        slot = self.slot_of(req_id)
        return self.columns["tokens"][slot, : self.columns["num_tokens"][slot]]

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop finished requests; unknown ids (never arrived, or dropped before) are no error."""
        for req_id in req_ids:
            state = self._states.pop(req_id, None)
            if state is not None:
                self.columns.free(state.slot)
                self.pooling.discard(req_id)
                if self._changes is not None:
                    self._changes.remove(state.slot)

    def park(self, req_ids: Iterable[str]) -> None:
        """Take the blocks of preempted requests; their tokens stay."""
        for req_id in req_ids:
            state = self._states.get(req_id)
            if state is not None:
                state.preempted = True
                self.block_tables.clear(state.slot)

    def check(self, plan: SchedulerOutput) -> None:
        """Raise MessageError (or BlockTableError) if the plan contradicts what is known here.

        ``plan.finished`` and ``plan.preempted`` are taken as applied already.
        """
        for request in plan.new:
            self._check_new(request, plan.num_tokens[request.req_id])
        for index, req_id in enumerate(plan.running.req_ids):
            self._check_running(plan, index, plan.num_tokens[req_id])

    def add(self, request: NewRequestData) -> None:
        """Take a new request in: lowest free slot, tokens, blocks, every column that reads it. If
        a column cannot read it, the slot is free again.
        """
        known = request.prefill_tokens or request.prompt
        slot = self.columns.take()
        try:
            self.columns.fill(slot, request)
        except BaseException:
            self.columns.free(slot)
            raise
        self.columns["tokens"][slot, : len(known)] = known
        self.columns["num_tokens"][slot] = len(known)
        self.columns["num_computed"][slot] = request.num_computed
        self.block_tables.append(slot, request.block_ids)
        self._states[request.req_id] = RequestState(
            req_id=request.req_id,
            slot=slot,
            sampling=request.sampling,
            seed=request.sampling.seed or 0,
            lora=request.lora,
            prompt_adapter=request.prompt_adapter,
            extra=request.extra,
            pooling=request.pooling,
        )
        if request.pooling is not None:
            self.pooling.add(request.req_id)
        if self._changes is not None:
            self._changes.add(
                AddedRequest(
                    slot=slot,
                    req_id=request.req_id,
                    prompt=request.prompt,
                    sampling=request.sampling,
                )
            )

    def record_changes(self) -> None:
        """Note from now on which requests come and go. Called before there is any."""
        self._changes = SlotChanges()

    def take_changes(self) -> RequestChanges | None:
        """Return, once, what came and went; None for nothing."""
        return None if self._changes is None else self._changes.take()

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the differences for running requests: computed counts are adopted, blocks appended
        or (resumed) replaced, tokens trimmed or filled in.
        """
        running = plan.running
        for index, req_id in enumerate(running.req_ids):
            state = self._states[req_id]
            self.columns["num_computed"][state.slot] = running.num_computed[index]
            self._update_tokens(plan, index, state)
            blocks = running.new_blocks[index]
            if req_id in running.resumed:
                self.block_tables.replace(state.slot, blocks or ())
                state.preempted = False
            elif blocks is not None:
                self.block_tables.append(state.slot, blocks)

    def append_token(self, req_id: str, token: int) -> None:
        """Add a sampled token to what is known; at the longest length there is no more to come, so
        it is not kept.
        """
        slot = self.slot_of(req_id)
        count = int(self.columns["num_tokens"][slot])
        if count < self.max_model_len:
            self.columns["tokens"][slot, count] = token
            self.columns["num_tokens"][slot] = count + 1

    def resize(self, max_model_len: int) -> None:
        """Adopt another longest length. Raises MessageError if a known request is longer."""
        for req_id, state in self._states.items():
            if (count := int(self.columns["num_tokens"][state.slot])) > max_model_len:
                raise MessageError(
                    f"max_model_len cannot become {max_model_len}: request {req_id!r} has {count} "
                    "tokens"
                )
        self.columns.resize("tokens", max_model_len)
        self.block_tables.resize(max_model_len)
        self.max_model_len = max_model_len

    def _update_tokens(self, plan: SchedulerOutput, index: int, state: RequestState) -> None:
        running, slot = plan.running, state.slot
        tokens, counts = self.columns["tokens"], self.columns["num_tokens"]
        before = count = int(counts[slot])
        given = running.all_tokens.get(running.req_ids[index])
        if given is not None:
            count = len(given)
            tokens[slot, :count] = given
        elif running.new_tokens:
            more = running.told(index, count - int(self.columns["num_prompt"][slot]))
            tokens[slot, count : count + len(more)] = more
            count += len(more)
        if running.num_output:
            count = min(count, int(self.columns["num_prompt"][slot]) + running.num_output[index])
        if count < before:
            tokens[slot, count:before] = 0
        if given is not None or count < before:
            state.kept.forget_counts()
        counts[slot] = count

    def _check_new(self, request: NewRequestData, count: int) -> None:
        req_id = request.req_id
        known = request.prefill_tokens or request.prompt
        if req_id in self._states:
            raise MessageError(f"request {req_id!r} is announced as new, but is known here")
        request.check()
        if request.sampling.prompt_logprobs is not None and request.num_computed:
            raise MessageError(
                f"request {req_id!r} asks for prompt_logprobs and begins at position "
                f"{request.num_computed}: what is not computed cannot be scored"
            )
        self._check_length(req_id, len(known))
        self.block_tables.check(req_id, None, request.block_ids)
        self._check_span(req_id, None, request.block_ids, request.num_computed + count, len(known))

    def _check_running(self, plan: SchedulerOutput, index: int, count: int) -> None:
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
        blocks = running.new_blocks[index]
        base = None if resumed else state.slot
        if resumed or blocks is not None:
            self.block_tables.check(req_id, base, blocks or ())
        known = self._known_after(plan, index, state.slot)
        self._check_length(req_id, known)
        if running.num_output:
            wanted = int(self.columns["num_prompt"][state.slot]) + running.num_output[index]
            if known < wanted:
                raise MessageError(
                    f"request {req_id!r}: the plan counts {wanted} tokens, only {known} are known"
                )
            known = wanted
        self._check_span(req_id, base, blocks, running.num_computed[index] + count, known)

    def _check_span(
        self, req_id: str, slot: int | None, blocks: BlockIds | None, end: int, known: int
    ) -> None:
        """Refuse to compute positions below ``end`` unless each has a known token and a block, in
        the rows of ``slot`` (None: empty rows) or in ``blocks``, which follow them.
        """
        if end > known:
            raise MessageError(
                f"request {req_id!r}: {end} positions are to be computed, only {known} tokens are "
                "known"
            )
        for index, table in enumerate(self.block_tables.tables):
            held = 0 if slot is None else table.count(slot)
            held += len(blocks[index]) * table.split if blocks else 0
            if held * table.block_size < end:
                raise MessageError(
                    f"request {req_id!r}: {end} positions need more than its {held} blocks of "
                    f"{table.block_size} tokens in KV cache group {table.group}"
                )

    def _known_after(self, plan: SchedulerOutput, index: int, slot: int) -> int:
        running = plan.running
        given = running.all_tokens.get(running.req_ids[index])
        if given is not None:
            return len(given)
        known = int(self.columns["num_tokens"][slot])
        if not running.new_tokens:
            return known
        return known + len(running.told(index, known - int(self.columns["num_prompt"][slot])))

    def _check_length(self, req_id: str, length: int) -> None:
        if length > self.max_model_len:
            raise MessageError(
                f"request {req_id!r} has {length} tokens, the longest here is {self.max_model_len}"
            )


def make_columns(max_model_len: int, capacity: int, more: Iterable[Column] = ()) -> Columns:
    """Build the table of the built-in columns and ``more`` over ``capacity`` slots."""
    return Columns((token_column(max_model_len), *COUNTS, *more), capacity)


def is_complete(requests: Requests, slots: Array, num_scheduled: Array) -> Array:
    """Return bool [n]: after this step, every known token of the request is in the cache, so the
    next token can be drawn. Unfinished prompts are not sampled at all.
    """
    after = requests.columns["num_computed"][slots] + num_scheduled
    complete: Array = np.greater_equal(after, requests.columns["num_tokens"][slots])
    return complete
