"""A step while it is being planned, and the limits it must keep."""

from __future__ import annotations

from attrs import define, field, frozen
from hardpoint.errors import ConfigError
from hardpoint.messages import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput

from hardpoint_engine.request import Request


@frozen(kw_only=True)
class StepLimits:
    """What a step may hold: the configuration's figures and the platform's (see
    :class:`hardpoint.records.Limits`). ``chunked`` False: a prompt is computed in one step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int | None = None
    mixed_batches: bool = True
    max_prefills_per_step: int | None = None
    chunk_multiple: int = 1
    chunked: bool = True

    def __attrs_post_init__(self) -> None:
        most = self.longest_chunk
        if self.chunked and most < self.chunk_multiple:
            raise ConfigError(
                f"a step holds at most {most} tokens of one prompt, and the platform computes "
                f"prompts in multiples of {self.chunk_multiple}: raise max_num_batched_tokens "
                f"(now {self.max_num_batched_tokens}) and prefill_chunk_size "
                f"(now {self.prefill_chunk_size})"
            )

    @property
    def longest_chunk(self) -> int:
        """Most tokens of one prompt in one step."""
        return min(
            self.max_num_batched_tokens, self.prefill_chunk_size or self.max_num_batched_tokens
        )

    @property
    def most_running(self) -> int:
        """Most requests that run at once, each with a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def chunk(self, wanted: int, room: int) -> int:
        """Return how many of ``wanted`` prompt tokens to compute now, with ``room`` tokens left in
        the step; 0 for none. A chunk that does not end the prompt is a multiple of
        ``chunk_multiple``.
        """
        most = min(room, self.longest_chunk)
        if wanted <= most:
            return wanted
        if not self.chunked or most <= 0:
            return 0
        return most - most % self.chunk_multiple


@define(eq=False, kw_only=True)
class StepDraft:
    """What is planned so far. ``room`` is the token budget left, ``prefills`` how many more
    requests may prefill. Index i of the lists is the same request.
    """

    room: int
    prefills: float
    requests: dict[str, Request] = field(factory=dict, init=False)
    new: list[NewRequestData] = field(factory=list, init=False)
    req_ids: list[str] = field(factory=list, init=False)
    new_blocks: list[BlockIds | None] = field(factory=list, init=False)
    num_computed: list[int] = field(factory=list, init=False)
    num_output: list[int] = field(factory=list, init=False)
    resumed: set[str] = field(factory=set, init=False)
    num_tokens: dict[str, int] = field(factory=dict, init=False)

    def output(
        self,
        step_id: int,
        finished: frozenset[str],
        preempted: frozenset[str],
        new_tokens: tuple[tuple[int, ...], ...] = (),
    ) -> SchedulerOutput:
        """Return the plan as the workers get it."""
        return SchedulerOutput(
            step_id=step_id,
            new=tuple(self.new),
            running=CachedRequestData(
                req_ids=tuple(self.req_ids),
                new_blocks=tuple(self.new_blocks),
                num_computed=tuple(self.num_computed),
                num_output=tuple(self.num_output),
                resumed=frozenset(self.resumed),
                new_tokens=new_tokens,
            ),
            num_tokens=self.num_tokens,
            total_tokens=sum(self.num_tokens.values()),
            finished=finished,
            preempted=preempted,
        )
