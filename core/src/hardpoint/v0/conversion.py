"""Steps of the older API (v0) become those of this one, and results become that API's.

Driver side, without I/O. The older API tells everything in each step and workers here keep what
they were told, so a converter remembers what that is. Each sequence is a request of its own:
``REQUEST`` while it is the only one, else ``REQUEST/SEQUENCE``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from attrs import define, frozen

from hardpoint.messages import (
    CachedRequestData,
    Logprobs,
    MessageError,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from hardpoint.sampling_params import LARGEST_SEED, SamplingParams
from hardpoint.v0.messages import (
    CompletionSequenceGroupOutput,
    ExecuteModelRequest,
    Logprob,
    PoolerOutput,
    PoolingSequenceGroupOutput,
    SamplerOutput,
    SequenceData,
    SequenceGroupMetadata,
    SequenceOutput,
)

NOT_SAMPLED = SamplingParams(temperature=0, max_tokens=1)
"""Of requests that end with a vector."""


def _draw_seed() -> int:
    return secrets.randbelow(LARGEST_SEED + 1)


@define(eq=False)
class _Known:
    """What the workers know of one sequence: those that sample have ``tokens``, the others the
    first ``num_told`` of them, which were in plans.
    """

    request_id: str
    seq_id: int
    tokens: tuple[int, ...]
    num_told: int
    blocks: tuple[int, ...]


@frozen
class _Part:
    """One sequence in one step."""

    req_id: str
    group: SequenceGroupMetadata
    seq_id: int
    data: SequenceData
    blocks: tuple[int, ...]
    count: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.data.prompt_token_ids + self.data.output_token_ids


class StepConverter:
    """Converts the steps of one driver to one group of workers, in their order.

    ``host_pool`` is the first KV block id of those that stand for the host's blocks (block h of the
    host is block ``host_pool + h``), None where there are none: swap lists must be empty then.
    ``draw_seed`` gives a seed to requests that draw and have none.
    """

    def __init__(
        self, *, host_pool: int | None = None, draw_seed: Callable[[], int] = _draw_seed
    ) -> None:
        self._host_pool = host_pool
        self._draw_seed = draw_seed
        self._known: dict[str, _Known] = {}
        self._step_id = 0

    def plan(self, request: ExecuteModelRequest) -> SchedulerOutput:
        """Return the plan of ``request``. Raises MessageError for what contradicts itself or no
        worker here can do; nothing is remembered of it then.
        """
        _refuse_unknown(request)
        copies = self._copies(request)
        parts = [part for group in request.seq_group_metadata_list for part in self._parts(group)]
        finished = self._finished(request, parts)
        new = tuple(self._new(part) for part in parts if self._is_new(part, finished))
        running = [part for part in parts if not self._is_new(part, finished)]
        self._step_id += 1
        plan = SchedulerOutput(
            step_id=self._step_id,
            new=new,
            running=self._running(running),
            num_tokens={part.req_id: part.count for part in parts},
            total_tokens=sum(part.count for part in parts),
            finished=frozenset(finished),
            block_copies=copies,
        )
        for req_id in finished:
            del self._known[req_id]
        for part in parts:
            self._known[part.req_id] = _Known(
                part.group.request_id, part.seq_id, part.tokens, len(part.tokens), part.blocks
            )
        return plan

    def sampler_output(
        self, request: ExecuteModelRequest, output: ModelRunnerOutput
    ) -> SamplerOutput:
        """Return the tokens that the step of ``request`` gave."""
        rows = dict(zip(output.req_ids, output.tokens, strict=True))
        groups = []
        for group in request.seq_group_metadata_list:
            parts = self._parts(group)
            for part in parts:  # so that the next step knows what the workers have
                known = self._known[part.req_id]
                known.tokens = part.tokens + rows.get(part.req_id, ())
            scores = output.prompt_logprobs.get(parts[0].req_id)
            groups.append(
                CompletionSequenceGroupOutput(
                    samples=[
                        SequenceOutput(
                            parent_seq_id=part.seq_id,
                            output_token=token,
                            logprobs=_row(output.logprobs.get(part.req_id), index),
                        )
                        for part in parts
                        for index, token in enumerate(rows.get(part.req_id, ()))
                    ],
                    prompt_logprobs=None
                    if scores is None
                    else [None, *(_row(scores, index) for index in range(len(scores.ids)))],
                )
            )
        return SamplerOutput(outputs=groups)

    def pooler_output(
        self, request: ExecuteModelRequest, output: ModelRunnerOutput
    ) -> PoolerOutput:
        """Return the vectors that the step of ``request`` gave."""
        return PoolerOutput(
            outputs=[
                PoolingSequenceGroupOutput(data=output.pooled.get(part.req_id))
                for group in request.seq_group_metadata_list
                for part in self._parts(group)
            ]
        )

    # The parts of a plan.

    def _parts(self, group: SequenceGroupMetadata) -> list[_Part]:
        parts = []
        for seq_id, data in group.seq_data.items():
            known = len(data.prompt_token_ids) + len(data.output_token_ids)
            left = known - data.num_computed_tokens
            count = left if group.is_prompt else 1
            if group.token_chunk_size is not None:
                count = group.token_chunk_size
            if not 0 < count <= left or group.do_sample != (count == left):
                raise MessageError(
                    f"request {group.request_id!r}, sequence {seq_id}: {count} of {left} tokens "
                    f"are to be computed, and do_sample is {group.do_sample}"
                )
            if seq_id not in group.block_tables:
                raise MessageError(
                    f"request {group.request_id!r}, sequence {seq_id}: it has no block table"
                )
            blocks = tuple(group.block_tables[seq_id])
            req_id = self._id_of(group, seq_id)
            parts.append(_Part(req_id, group, seq_id, data, blocks, count))
        if not parts:
            raise MessageError(f"request {group.request_id!r} has no sequence")
        return parts

    def _id_of(self, group: SequenceGroupMetadata, seq_id: int) -> str:
        """Return the id by which the workers know a sequence, or shall."""
        for req_id in (group.request_id, f"{group.request_id}/{seq_id}"):
            known = self._known.get(req_id)
            if known is not None and known.seq_id == seq_id:
                return req_id
        alone = len(group.seq_data) == 1 and group.request_id not in self._known
        return group.request_id if alone else f"{group.request_id}/{seq_id}"

    def _finished(self, request: ExecuteModelRequest, parts: Sequence[_Part]) -> set[str]:
        """Return who is known and ended: by name, or because its request goes on without it."""
        ended = set(request.finished_requests_ids)
        scheduled = {part.group.request_id for part in parts}
        here = {part.req_id for part in parts}
        return {
            req_id
            for req_id, known in self._known.items()
            if known.request_id in ended or (known.request_id in scheduled and req_id not in here)
        }

    def _is_new(self, part: _Part, finished: set[str]) -> bool:
        return part.req_id not in self._known or part.req_id in finished

    def _new(self, part: _Part) -> NewRequestData:
        group, data = part.group, part.data
        pooled = group.pooling_params is not None
        if pooled == (group.sampling_params is not None):
            raise MessageError(
                f"request {group.request_id!r} needs sampling_params or pooling_params, one of them"
            )
        sampling = group.sampling_params or NOT_SAMPLED
        if sampling.seed is None and not sampling.greedy:
            sampling = sampling.with_seed(self._draw_seed())
        lora, adapter = group.lora_request, group.prompt_adapter_request
        return NewRequestData(
            req_id=part.req_id,
            prompt=data.prompt_token_ids,
            sampling=sampling,
            block_ids=(part.blocks,),
            num_computed=data.num_computed_tokens,
            prefill_tokens=part.tokens if data.output_token_ids else None,
            lora=None if lora is None else lora.converted(),
            prompt_adapter=None if adapter is None else adapter.converted(),
            pooling=group.pooling_params,
        )

    def _running(self, parts: Sequence[_Part]) -> CachedRequestData:
        new_blocks: list[tuple[tuple[int, ...], ...] | None] = []
        resumed, all_tokens = set(), {}
        for part in parts:
            known = self._known[part.req_id]
            more = part.blocks[len(known.blocks) :]
            if part.blocks[: len(known.blocks)] != known.blocks:
                resumed.add(part.req_id)
                more = part.blocks
            new_blocks.append((more,) if more else None)
            if part.tokens != known.tokens:  # the driver chose otherwise than the workers
                all_tokens[part.req_id] = part.tokens
        return CachedRequestData(
            req_ids=tuple(part.req_id for part in parts),
            new_blocks=tuple(new_blocks),
            num_computed=tuple(part.data.num_computed_tokens for part in parts),
            num_output=tuple(len(part.data.output_token_ids) for part in parts),
            new_tokens=tuple(part.tokens[self._known[part.req_id].num_told :] for part in parts),
            resumed=frozenset(resumed),
            all_tokens=all_tokens,
        )

    def _copies(self, request: ExecuteModelRequest) -> tuple[tuple[int, int, int], ...]:
        """Return all movements of blocks, in the order in which that API makes them."""
        base = self._host_pool
        if base is None:
            if request.blocks_to_swap_in or request.blocks_to_swap_out:
                raise MessageError(
                    "the step swaps blocks, and there are none of the host: leave the lists empty "
                    "and preempt by computing again, or name host_pool"
                )
            base = 0
        swapped_in = [(0, base + source, target) for source, target in request.blocks_to_swap_in]
        swapped_out = [(0, source, base + target) for source, target in request.blocks_to_swap_out]
        copied = [(0, source, target) for source, target in request.blocks_to_copy]
        return (*swapped_in, *swapped_out, *copied)


def _refuse_unknown(request: ExecuteModelRequest) -> None:
    for name, usual in (("virtual_engine", 0), ("num_steps", 1)):
        if (value := getattr(request, name)) != usual:
            raise MessageError(f"{name} is {value}; workers here take {usual} only")
    for group in request.seq_group_metadata_list:
        if group.multi_modal_data is not None:
            raise MessageError(f"request {group.request_id!r} has multi_modal_data: text only here")


def _row(scores: Logprobs | None, index: int) -> Mapping[int, Logprob]:
    """Return one row by token id: the token itself first, then the best, then the listed ones."""
    if scores is None:
        return {}
    found: dict[int, Logprob] = {}
    pairs = zip(scores.ids[index], scores.values[index], strict=True)
    for column, (token, value) in enumerate(pairs):
        if token not in found:
            rank = scores.ranks[index][column] if column <= scores.num_best else None
            found[token] = Logprob(logprob=value, rank=rank)
    return found
