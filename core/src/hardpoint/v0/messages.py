"""What a driver of the older API (v0) sends for a step, and what it gets.

Each step tells a request's whole state: prompt, output and blocks of each of its sequences. Names
and fields are that API's; what no worker here can do has no field. Nothing of this crosses to a
worker: :mod:`hardpoint.v0.conversion` makes a SchedulerOutput of it in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from hardpoint import adapters
from hardpoint.pooling_params import PoolingParams
from hardpoint.sampling_params import SamplingParams


@frozen(kw_only=True)
class LoRARequest:
    """A LoRA adapter by its older names."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def converted(self) -> adapters.LoRARequest:
        """Return it as workers know it."""
        return adapters.LoRARequest(id=self.lora_int_id, name=self.lora_name, path=self.lora_path)


@frozen(kw_only=True)
class PromptAdapterRequest:
    """A soft prompt by its older names."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str
    prompt_adapter_num_virtual_tokens: int

    def converted(self) -> adapters.PromptAdapterRequest:
        """Return it as workers know it."""
        return adapters.PromptAdapterRequest(
            id=self.prompt_adapter_id,
            name=self.prompt_adapter_name,
            path=self.prompt_adapter_local_path,
            num_virtual_tokens=self.prompt_adapter_num_virtual_tokens,
        )


@frozen(kw_only=True)
class SequenceData:
    """One sequence: ids of prompt and output, of which ``num_computed_tokens`` are in the cache."""

    prompt_token_ids: tuple[int, ...] = field(converter=tuple[int, ...])
    output_token_ids: tuple[int, ...] = field(default=(), converter=tuple[int, ...])
    num_computed_tokens: int = 0


@frozen(kw_only=True)
class SequenceGroupMetadata:
    """A request in a step, with its sequences by id; several continue one prompt.

    ``block_tables`` has all KV block ids of each sequence. ``token_chunk_size`` tokens of each are
    computed now (None: the rest of the prompt, or one). ``do_sample``: the step reaches the last
    known token. ``pooling_params`` are given instead of ``sampling_params`` for a vector.
    """

    request_id: str
    is_prompt: bool
    seq_data: Mapping[int, SequenceData]
    block_tables: Mapping[int, Sequence[int]]
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    do_sample: bool = True
    token_chunk_size: int | None = None
    lora_request: LoRARequest | None = None
    prompt_adapter_request: PromptAdapterRequest | None = None
    multi_modal_data: object = None


@frozen(kw_only=True)
class ExecuteModelRequest:
    """One step. Swap lists move blocks between the device (``out`` of it, ``in`` to it) and the
    host: pairs of source and destination, as ``blocks_to_copy`` has them within the device.
    ``async_callback`` is for whoever runs the step.
    """

    seq_group_metadata_list: Sequence[SequenceGroupMetadata] = ()
    blocks_to_swap_in: Sequence[tuple[int, int]] = ()
    blocks_to_swap_out: Sequence[tuple[int, int]] = ()
    blocks_to_copy: Sequence[tuple[int, int]] = ()
    virtual_engine: int = 0
    num_lookahead_slots: int = 0
    running_queue_size: int = 0
    num_steps: int = 1
    finished_requests_ids: Sequence[str] = ()
    async_callback: Callable[[], None] | None = None


@frozen(kw_only=True)
class Logprob:
    """A token's log-probability, and its 1-based rank where it was counted; texts come later."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@frozen(kw_only=True)
class SequenceOutput:
    """The next token of sequence ``parent_seq_id``, and scores by token id, its own among them if
    any were asked for.
    """

    parent_seq_id: int
    output_token: int
    logprobs: Mapping[int, Logprob] = field(factory=dict)


@frozen(kw_only=True)
class CompletionSequenceGroupOutput:
    """What a step gave a request: no sample while its prompt is not finished. ``prompt_logprobs``
    has an entry for each prompt token, None for the first.
    """

    samples: Sequence[SequenceOutput] = ()
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None


@frozen(kw_only=True)
class PoolingSequenceGroupOutput:
    """The vector of a request, None while its prompt is not finished."""

    data: Sequence[float] | None


@frozen(kw_only=True)
class SamplerOutput:
    """What a step gave, in the order of its requests."""

    outputs: Sequence[CompletionSequenceGroupOutput] = ()


@frozen(kw_only=True)
class PoolerOutput:
    """Vectors, in the order of the step's requests."""

    outputs: Sequence[PoolingSequenceGroupOutput] = ()
