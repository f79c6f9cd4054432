"""The worker's cache of the requests, kept current by the messages; the driver alone knows."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.messages import CachedRequestData, MessageError, NewRequestData, SchedulerOutput
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

from hardpoint_dummy.extras import RequestExtra, request_extra


@define(eq=False)
class RequestState:
    """One request as this worker knows it."""

    req_id: str
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    blocks: list[list[int]]
    num_computed: int
    lora: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    pooling: PoolingParams | None = None
    extra: RequestExtra = field(factory=RequestExtra)
    prompt_scored: bool = False

    @property
    def prompt(self) -> list[int]:
        """The ids of the prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> list[int]:
        """The ids chosen so far."""
        return self.tokens[self.prompt_length :]


class RequestTable:
    """Every request that this worker knows, by id."""

    def __init__(self, *, trim: bool) -> None:
        self._states: dict[str, RequestState] = {}
        self._trim = trim

    def __getitem__(self, req_id: str) -> RequestState:
        state = self._states.get(req_id)
        if state is None:
            raise MessageError(f"request {req_id} is not known to this worker")
        return state

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, step: SchedulerOutput) -> list[RequestState]:
        """Forget the finished, take in the new and the changes; return those scheduled, in order.

        Raises MessageError for a plan that contradicts itself or what is known.
        """
        step.check()
        for req_id in step.finished:
            self._states.pop(req_id, None)
        for req_id in step.preempted:
            self[req_id].blocks = [[] for _ in self[req_id].blocks]
        return [self._add(new) for new in step.new] + self._update(step.running)

    def _add(self, new: NewRequestData) -> RequestState:
        if new.req_id in self._states:
            raise MessageError(f"request {new.req_id} is new to the driver but known here")
        tokens = list(new.prefill_tokens or new.prompt)
        if not 0 <= new.num_computed < len(tokens):
            raise MessageError(
                f"request {new.req_id}: {new.num_computed} computed of {len(tokens)} tokens"
            )
        state = self._states[new.req_id] = RequestState(
            req_id=new.req_id,
            tokens=tokens,
            prompt_length=len(new.prompt),
            sampling=new.sampling,
            blocks=[list(group) for group in new.block_ids],
            num_computed=new.num_computed,
            lora=new.lora,
            prompt_adapter=new.prompt_adapter,
            pooling=new.pooling,
            extra=request_extra(new.extra),
        )
        return state

    def _update(self, running: CachedRequestData) -> list[RequestState]:
        states = []
        for index, req_id in enumerate(running.req_ids):
            state = self[req_id]
            new_blocks = running.new_blocks[index]
            if req_id in running.resumed:
                state.blocks = [list(group) for group in new_blocks or ()]
            elif new_blocks is not None:
                for mine, added in zip(state.blocks, new_blocks, strict=True):
                    mine.extend(added)
            state.num_computed = running.num_computed[index]
            self._update_tokens(state, running, index)
            states.append(state)
        return states

    def _update_tokens(self, state: RequestState, running: CachedRequestData, index: int) -> None:
        if state.req_id in running.all_tokens:
            state.tokens = list(running.all_tokens[state.req_id])
        else:
            state.tokens += running.told(index, len(state.tokens) - state.prompt_length)
        if index >= len(running.num_output):
            return
        known = len(state.tokens) - state.prompt_length
        wanted = running.num_output[index]
        if wanted > known:
            raise MessageError(
                f"request {state.req_id}: the driver has {wanted} output tokens, this worker "
                f"{known}, and the plan does not bring them"
            )
        if self._trim:
            del state.tokens[state.prompt_length + wanted :]
