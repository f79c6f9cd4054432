"""Every configuration key: its type, default and meaning. None means unset: the platform or the
engine decides.

A key is addressed by its bare name (``dtype``), a plugin's by ``plugins.NAME.KEY``. The same names
are command-line flags (``--max-num-seqs``), environment variables (``HARDPOINT_MAX_NUM_SEQS``),
TOML keys and Python keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription


def key(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    **more: Any,
) -> Any:
    """Declare one key: default, one-line help, allowed values, and bounds: at least ``low``, more
    than ``above``, at most ``high``. Plugins' settings classes use it too; ``more`` goes to
    :func:`attrs.field`.
    """
    metadata = {"help": help, "choices": choices, "low": low, "above": above, "high": high}
    return field(default=default, metadata=metadata, **more)


@frozen(kw_only=True)
class ModelConfig:
    """What to run."""

    model: str | None = key(None, "folder of a Hugging Face checkpoint, or a GGUF file")
    tokenizer: str | None = key(None, "folder or file with the tokenizer, if not the model's own")
    dtype: str = key(
        "auto",
        "type of the weights in memory",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = key(
        None, "how weights are packed while they are loaded; unset: as they are stored"
    )
    batch_invariant: bool = key(
        False, "compute a request to the same bits whatever else is computed, or refuse the run"
    )
    max_model_len: int | None = key(None, "longest request in tokens, answer included", low=1)
    seed: int | None = key(None, "seed of requests that bring none; unset: a fresh one", low=0)


@frozen(kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int | None = key(None, "tokens in one KV block", low=1)
    num_kv_blocks: int | None = key(
        None, "KV blocks to allocate, the null block included, instead of measuring", low=2
    )
    kv_cache_memory_bytes: int | None = key(
        None, "bytes for the KV cache, instead of measuring", low=1
    )
    memory_utilization: float = key(
        0.9, "share of the memory limit that weights and KV cache may use", above=0, high=1
    )
    kv_cache_dtype: str = key(
        "auto",
        "type of cached keys and values; int8 keeps a scale with each head of each token",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    enable_prefix_caching: bool = key(True, "reuse the cache of equal prompt beginnings")


@frozen(kw_only=True)
class ParallelConfig:
    """How a model is spread over workers."""

    tensor_parallel_size: int = key(1, "workers that share each layer", low=1)
    pipeline_parallel_size: int = key(1, "stages of consecutive layers", low=1)
    data_parallel_size: int = key(1, "copies of the model", low=1)
    nnodes: int = key(1, "hosts that take part", low=1)
    forward_env: tuple[str, ...] = key(
        (), "variables that workers on other hosts get of the driver's, as GLOO_*; never secrets"
    )
    collective_timeout: float = key(
        300.0, "seconds for which a worker waits for the others in one exchange of tensors", above=0
    )


@frozen(kw_only=True)
class SchedulerConfig:
    """What runs in one step."""

    max_num_seqs: int | None = key(None, "requests that may run at once", low=1)
    max_num_batched_tokens: int | None = key(None, "tokens that may be computed in one step", low=1)
    prefill_chunk_size: int | None = key(
        None, "most prompt tokens of one request in one step", low=1
    )
    admission: str | None = key(None, "name of the admission policy")
    async_scheduling: bool = key(False, "plan a step while the previous one runs")


@frozen(kw_only=True)
class SamplingConfig:
    """How tokens are chosen, beside what each request asks for."""

    max_logprobs: int = key(
        20, "most log-probabilities of one token that a request may ask for; -1: any number", low=-1
    )
    logprobs_mode: str = key(
        "raw_logprobs",
        "what log-probabilities are of: the model's logits or those that a token is chosen from; "
        "or these logits themselves",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    logits_processors: tuple[str | type, ...] = key(
        (), "what changes logits before a choice: references 'module:Class', in order"
    )


@frozen(kw_only=True)
class LoadConfig:
    """How weights are read."""

    load_format: str = key(
        "auto",
        "format of the checkpoint",
        choices=("auto", "safetensors", "gguf", "sharded_state", "dummy"),
    )


@frozen(kw_only=True)
class DeviceConfig:
    """Which devices."""

    devices: tuple[str, ...] | None = key(None, "logical device ids to use")


@frozen(kw_only=True)
class LoRAConfig:
    """LoRA adapters."""

    max_loras: int = key(0, "different adapters in one batch; 0: none", low=0)


@frozen(kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    num_speculative_tokens: int = key(0, "drafts per request and step; 0: none", low=0)


@frozen(kw_only=True)
class PromptAdapterConfig:
    """Prompt adapters."""

    max_prompt_adapters: int = key(0, "different soft prompts in one batch; 0: none", low=0)


@frozen(kw_only=True)
class RpcConfig:
    """How calls travel to workers."""

    pickle: str = key(
        "local",
        "what may be unpickled: anything from this host's own workers (local), or nothing (never)",
        choices=("local", "never"),
    )
    spin_us: float = key(
        200.0, "microseconds for which a waiting side yields the processor before it sleeps", low=0
    )
    heartbeat: float = key(1.0, "seconds between two signs of life of a worker", above=0)


@frozen(kw_only=True)
class GraphConfig:
    """Recorded graphs."""

    graph_mode: str | None = key(
        None,
        "what is recorded once and replayed; unset: what suits the platform",
        choices=("none", "piecewise", "full", "full_and_piecewise", "full_decode_only"),
    )
    graph_sizes: tuple[int, ...] | None = key(
        None, "token counts that graphs are made for; unset: what suits the platform", low=1
    )
    graph_warm_ups: int = key(1, "eager runs before each graph is recorded", low=0)
    graph_per_lora_count: bool = key(
        True, "make graphs for several counts of adapters instead of one for all"
    )
    graph_policy: str | None = key(None, "name of the policy that sizes and chooses graphs")
    graph_stats: bool = key(
        False, "print how steps were padded and run, as a table, when the engine ends"
    )


@frozen(kw_only=True)
class ObservabilityConfig:
    """What is told."""

    log_level: str = key(
        "warning", "least level logged", choices=("debug", "info", "warning", "error")
    )
    batch_timing_interval: float | None = key(
        None,
        "seconds between two log lines with the median time of a step by its size; each step then "
        "waits for the device; unset: none",
        above=0,
    )
    profile_folder: str | None = key(
        None, "folder for the traces of profile(), a file for each worker; unset: none are taken"
    )


@frozen(kw_only=True)
class PluginsConfig:
    """Which plugins, and their own keys.

    ``settings`` maps a plugin's name to its raw keys until that plugin is selected, then to an
    instance of the settings class it declares.
    """

    disable: tuple[str, ...] = key((), "plugins never to load")
    strict: bool = key(False, "make a plugin that fails to load an error instead of a warning")
    provider: Mapping[str, str] = field(
        factory=dict, metadata={"help": "plugin name -> distribution, where two claim it"}
    )
    settings: Mapping[str, Any] = field(factory=dict, metadata={"help": "each plugin's own keys"})


@frozen(kw_only=True)
class Config:
    """The whole configuration: frozen; later stages make new ones.

    ``executor`` is a name, a ``"module:Class"`` or dotted reference, or a class. ``description`` is
    what the model's files say, once read. ``origins`` maps the path of each key that somebody set
    to who set it (``flag --dtype``, ``HARDPOINT_DTYPE``, ``FILE.toml``, ``Python``, ``plugin cpu:
    reason``, ``default of platform cpu``).
    """

    platform: str | None = key(None, "kind of hardware; unset: the best available")
    executor: str | type | None = key(None, "how workers are started; unset: what fits")  # noqa: RUF009
    worker: str | None = key(None, "extension whose Worker class is used instead of the platform's")
    model_runner: str | None = key(
        None, "extension whose ModelRunner class is used instead of the platform's"
    )
    model: ModelConfig = field(factory=ModelConfig)
    cache: CacheConfig = field(factory=CacheConfig)
    parallel: ParallelConfig = field(factory=ParallelConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig)
    sampling: SamplingConfig = field(factory=SamplingConfig)
    load: LoadConfig = field(factory=LoadConfig)
    device: DeviceConfig = field(factory=DeviceConfig)
    lora: LoRAConfig = field(factory=LoRAConfig)
    speculative: SpeculativeConfig = field(factory=SpeculativeConfig)
    prompt_adapter: PromptAdapterConfig = field(factory=PromptAdapterConfig)
    rpc: RpcConfig = field(factory=RpcConfig)
    graph: GraphConfig = field(factory=GraphConfig)
    observability: ObservabilityConfig = field(factory=ObservabilityConfig)
    plugins: PluginsConfig = field(factory=PluginsConfig)
    description: ModelDescription | None = None
    origins: Mapping[str, str] = field(factory=dict)

    def is_explicit(self, path: str) -> bool:
        """Whether the user set this key (flag, environment, file or Python), so that nobody may
        change it.
        """
        origin = self.origins.get(path)
        return origin is not None and not origin.startswith(("plugin ", "default "))

    def settings_of(self, name: str) -> Any:
        """Return the settings of plugin ``name``: an instance of its class once selected, else its
        raw keys.
        """
        return self.plugins.settings.get(name)
