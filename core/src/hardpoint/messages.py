"""All that crosses between the driver and the workers in a step.

The driver alone holds what a request is; workers hold a cache of it that these messages keep
current. Steps are numbered and commit once: a result whose ``step_id`` or ``generation`` is not the
awaited one is dropped. Every message carries ``extra``: plugin name -> that plugin's own record,
passed on untouched. Token ids are ints in [0, vocab). Tensors never travel here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.errors import HardpointError
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams

Extra = Mapping[str, object]
BlockIds = tuple[tuple[int, ...], ...]
"""One tuple of block ids per KV cache group; block i of a group holds positions [i*block_size,
(i+1)*block_size).
"""


class MessageError(HardpointError):
    """A message contradicts itself or what the worker knows.

    What to do: nothing as a user: the engine and the platform disagree. Report it with the message.
    """


@frozen(kw_only=True)
class NewRequestData:
    """A request these workers have never seen, or forgot because it finished.

    ``prompt`` are the prompt's ids. ``prefill_tokens``, when set, are prompt + outputs already
    chosen, to be computed again by a worker that does not know the request (after recovery).
    ``num_computed`` positions are in the cache already (a prefix hit); it is below
    ``len(prefill_tokens or prompt)``. ``sampling.seed`` is always set by the driver. With
    ``pooling`` the request is not sampled: it ends with a vector in ``ModelRunnerOutput.pooled``.
    """

    req_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    block_ids: BlockIds
    num_computed: int = 0
    prefill_tokens: tuple[int, ...] | None = None
    lora: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    pooling: PoolingParams | None = None
    extra: Extra = field(factory=dict)

    def check(self) -> None:
        """Raise MessageError if the request contradicts itself. Called by workers on receipt."""
        known = self.prefill_tokens or self.prompt
        if not self.prompt:
            raise MessageError(f"request {self.req_id!r} has an empty prompt")
        if self.sampling.seed is None and not self.sampling.greedy:
            raise MessageError(f"request {self.req_id!r} draws, but the driver gave it no seed")
        if known[: len(self.prompt)] != self.prompt:
            raise MessageError(
                f"request {self.req_id!r}: prefill_tokens do not begin with the prompt"
            )
        if not 0 <= self.num_computed < len(known):
            raise MessageError(
                f"request {self.req_id!r}: num_computed {self.num_computed} is not below its "
                f"{len(known)} tokens"
            )


@frozen(kw_only=True)
class CachedRequestData:
    """Only the differences for requests the workers know; index i of every sequence is the same
    request.

    ``new_blocks[i]`` are appended, None for none; for an id in ``resumed`` they *replace* all its
    blocks. ``num_computed[i]`` is authoritative: the worker adopts it (this is how rejected drafts
    are rolled back). ``num_output[i]`` is how many output tokens the scheduler has.
    ``new_tokens`` is there where some workers do not sample (earlier pipeline stages): row i has
    the last of the ``num_output[i]`` ids, as many as no plan has had; a worker takes those that it
    lacks (:meth:`told`). ``all_tokens`` has full ids for requests that a worker may hold stale.
    """

    req_ids: tuple[str, ...] = ()
    new_blocks: tuple[BlockIds | None, ...] = ()
    num_computed: tuple[int, ...] = ()
    num_output: tuple[int, ...] = ()
    resumed: frozenset[str] = frozenset()
    new_tokens: tuple[tuple[int, ...], ...] = ()
    all_tokens: Mapping[str, tuple[int, ...]] = field(factory=dict)

    def told(self, index: int, known: int) -> tuple[int, ...]:
        """Return the ids that follow for a worker that knows ``known`` output ids of request
        ``index``: none where it has sampled them itself.
        """
        if not self.new_tokens:
            return ()
        tokens = self.new_tokens[index]
        lacking = self.num_output[index] - known if self.num_output else len(tokens)
        return tokens[max(0, len(tokens) - lacking) :] if lacking > 0 else ()


@frozen(kw_only=True)
class SchedulerOutput:
    """One step's plan: scheduler -> executor -> every worker.

    ``num_tokens`` maps each scheduled request to the tokens to compute now (>= 1, drafts included);
    its keys are the new and the running ones; ``total_tokens`` is their sum. ``finished`` are ids
    finished or aborted since the previous plan: workers forget them before anything else, also when
    ``total_tokens`` is 0. ``preempted`` lost their blocks; their state stays. Order of cache work:
    ``blocks_to_zero``, then ``block_copies`` (group, source, destination), then forward.
    ``defer_sampling``: return a StepTicket and wait for ``sample_tokens`` (a grammar mask is
    pending).
    """

    step_id: int
    generation: int = 0
    new: tuple[NewRequestData, ...] = ()
    running: CachedRequestData = field(factory=CachedRequestData)
    num_tokens: Mapping[str, int] = field(factory=dict)
    total_tokens: int = 0
    finished: frozenset[str] = frozenset()
    preempted: frozenset[str] = frozenset()
    drafts: Mapping[str, tuple[int, ...]] = field(factory=dict)
    blocks_to_zero: tuple[int, ...] = ()
    block_copies: tuple[tuple[int, int, int], ...] = ()
    defer_sampling: bool = False
    extra: Extra = field(factory=dict)

    def check(self) -> None:
        """Raise MessageError if the plan contradicts itself. Called by workers on receipt."""
        scheduled = [request.req_id for request in self.new] + list(self.running.req_ids)
        if len(scheduled) != len(set(scheduled)) or set(scheduled) != set(self.num_tokens):
            raise MessageError(
                f"step {self.step_id}: num_tokens names other requests than new and running"
            )
        if self.total_tokens != sum(self.num_tokens.values()) or any(
            n < 1 for n in self.num_tokens.values()
        ):
            raise MessageError(
                f"step {self.step_id}: total_tokens {self.total_tokens} is not their sum"
            )
        running = self.running
        if not len(running.req_ids) == len(running.new_blocks) == len(running.num_computed):
            raise MessageError(f"step {self.step_id}: the sequences of running differ in length")
        if running.new_tokens and len(running.new_tokens) != len(running.req_ids):
            raise MessageError(
                f"step {self.step_id}: new_tokens has {len(running.new_tokens)} rows for "
                f"{len(running.req_ids)} running requests"
            )
        for req_id, drafts in self.drafts.items():
            if len(drafts) > self.num_tokens.get(req_id, 0) - 1:
                raise MessageError(
                    f"step {self.step_id}: request {req_id} has more drafts than tokens to compute"
                )


@frozen(kw_only=True)
class Logprobs:
    """Log-probabilities of m generated (or prompt) tokens, row by row: row j is of token j. The key
    ``logprobs_mode`` says of which logits they are, or that they are these logits themselves.

    The columns of a row, in ``ids[j]`` and ``values[j]`` alike: column 0 is the sampled (or actual)
    token. Columns 1 to ``num_best`` are the best of the whole vocabulary, best first, of equals the
    lowest id first: as many as the request's ``logprobs`` (or ``prompt_logprobs``) asks for, and
    column 0's token again where it is one of them. The rest are those of ``logprob_token_ids`` that
    are not among the best, best first, each once.

    ``ranks[j]`` are the ranks of the columns 0 to ``num_best``: how many values of the vocabulary
    are >= the column's own. A listed one has none.
    """

    ids: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]
    ranks: tuple[tuple[int, ...], ...]
    num_best: int

    def __attrs_post_init__(self) -> None:
        widths = [*map(len, self.ids)]
        if widths != [*map(len, self.values)] or len(widths) != len(self.ranks):
            raise MessageError("log-probabilities: ids, values and ranks are not of equal length")
        if not 0 <= self.num_best < min(widths, default=self.num_best + 1):
            raise MessageError(
                f"log-probabilities: num_best = {self.num_best} best ones and the token itself do "
                f"not fit a row of {min(widths, default=0)} columns"
            )
        if any(len(ranks) != self.num_best + 1 for ranks in self.ranks):
            raise MessageError(
                f"log-probabilities: a row has not the ranks of its token and {self.num_best} best"
            )


@frozen(kw_only=True)
class StepTimings:
    """Seconds this worker spent in the phases of one step."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


@frozen(kw_only=True)
class GraphStats:
    """How one step was dispatched: token counts before and after padding, and the mode's name."""

    unpadded: int
    padded: int
    mode: str


@frozen(kw_only=True)
class KVConnectorOutput:
    """One rank's report about external KV transfers of one step; ``rank`` and ``step_id`` make
    duplicates recognisable.
    """

    rank: int
    step_id: int
    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    failed_receiving: frozenset[str] = frozenset()
    invalid_blocks: frozenset[int] = frozenset()
    expected_reports: int = 0
    extra: Extra = field(factory=dict)


@frozen(kw_only=True)
class ECConnectorOutput:
    """One rank's report about encoder-cache transfers, by item hash."""

    rank: int
    step_id: int
    finished_sending: frozenset[str] = frozenset()
    finished_receiving: frozenset[str] = frozenset()
    extra: Extra = field(factory=dict)


@frozen(kw_only=True)
class ModelRunnerOutput:
    """One step's result, from the output rank.

    ``req_ids`` is the batch order of this result. ``tokens[i]`` holds 0 (prompt not finished), 1,
    or up to 1 + drafts ids. ``logprobs[req_id]`` has one row per generated token, only for requests
    that asked. ``prompt_logprobs[req_id]`` has prompt_len - 1 rows (row i scores prompt token i +
    1), in the step that finished the prompt. ``pooled[req_id]`` is the vector of a request with
    ``pooling``, in that step, too; it has no tokens. ``nan_counts[req_id]`` is there where the
    numbers of a request were none: how many of its logits, or of its vector's places, were NaN or
    +inf; 0 where none was, but all logits were -inf, so that nothing was left to choose.
    """

    step_id: int
    generation: int = 0
    req_ids: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    logprobs: Mapping[str, Logprobs] = field(factory=dict)
    prompt_logprobs: Mapping[str, Logprobs] = field(factory=dict)
    pooled: Mapping[str, tuple[float, ...]] = field(factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(factory=dict)
    nan_counts: Mapping[str, int] = field(factory=dict)
    kv: KVConnectorOutput | None = None
    ec: ECConnectorOutput | None = None
    timings: StepTimings | None = None
    graph_stats: GraphStats | None = None
    extra: Extra = field(factory=dict)


@frozen(kw_only=True)
class StepTicket:
    """Phase one of a step is done; ``sample_tokens(ticket, grammar)`` gives its output."""

    step_id: int
    generation: int = 0


@frozen(kw_only=True)
class GrammarOutput:
    """Masks for the structured requests of one step.

    ``masks[i]`` belongs to ``req_ids[i]`` and has one row per draft plus one; a row is ceil(vocab /
    32) little-endian 32-bit words, bit = 1 allowed. ``acceptable_drafts[i]``: leading drafts that
    the mask covers; later ones are rejected.
    """

    req_ids: tuple[str, ...]
    masks: tuple[tuple[bytes, ...], ...]
    acceptable_drafts: tuple[int, ...] | None = None


@frozen(kw_only=True)
class DraftTokenIds:
    """Drafts proposed after a step, by request."""

    req_ids: tuple[str, ...]
    drafts: Sequence[tuple[int, ...]]
