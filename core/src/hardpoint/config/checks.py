"""The general rules of a complete configuration, judged against what the platform says of itself.

Each rule yields problems; none stops another. Rules of one kind of hardware belong to its
``Platform.check``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from hardpoint.capabilities import Capability, Support
from hardpoint.config.keys import get
from hardpoint.config.problems import did_you_mean, with_origin
from hardpoint.config.schema import Config
from hardpoint.errors import PluginError
from hardpoint.records import Limits, Placement, Problem

if TYPE_CHECKING:
    from hardpoint.executor import Executor
    from hardpoint.platform import Platform
    from hardpoint.registry import Registry

NEEDS = (
    ("tensor_parallel_size", 1, Capability.TENSOR_PARALLEL),
    ("pipeline_parallel_size", 1, Capability.PIPELINE_PARALLEL),
    ("data_parallel_size", 1, Capability.DATA_PARALLEL),
    ("max_loras", 0, Capability.LORA),
    ("max_prompt_adapters", 0, Capability.PROMPT_ADAPTERS),
    ("num_speculative_tokens", 0, Capability.SPECULATIVE),
    ("async_scheduling", False, Capability.ASYNC_SCHEDULING),
    ("enable_prefix_caching", False, Capability.PREFIX_CACHING),
    ("logits_processors", (), Capability.LOGITS_PROCESSORS),
    ("logprobs_mode", "raw_logprobs", Capability.LOGPROBS_MODES),
    ("batch_invariant", False, Capability.BATCH_INVARIANCE),
)
"""Keys that need a capability as soon as their value is another than the one given."""


@frozen(kw_only=True)
class Case:
    """What the rules look at."""

    config: Config
    platform: Platform
    limits: Limits
    placement: Placement
    executor_class: type[Executor] | None

    def problem(self, path: str, message: str, way_out: str = "") -> Problem:
        """A problem of the value that the configuration has for ``path``."""
        return Problem(key=path, value=get(self.config, path), message=message, way_out=way_out)

    def supports(self, capability: Capability) -> bool:
        """Whether the platform says yes to ``capability``."""
        return self.platform.support(capability) is Support.YES


def config_problems(
    config: Config,
    registry: Registry,
    platform: Platform,
    executor_class: type[Executor] | None,
) -> Iterator[Problem]:
    """Yield every problem, each with the origin of its value."""
    case = Case(
        config=config,
        platform=platform,
        limits=platform.limits(config),
        placement=_placement(config, platform),
        executor_class=executor_class,
    )
    problems = capability_problems(config, platform)
    for rule in (_types, _cache, _scheduling, _sampling, _model, _parallel, _devices, _graphs):
        problems += rule(case)
    problems += [*_extensions(config, registry), *_graph_policy(config, registry, platform)]
    problems += _quantization(config, registry, platform)
    problems += _platform_problems(config, platform)
    for problem in problems:
        yield _blaming(with_origin(problem, config.origins), registry)


def _blaming(problem: Problem, registry: Registry) -> Problem:
    """Add the way out of a value that an extension chose."""
    origin, _, _ = problem.origin.partition(":")
    name = origin.removeprefix("plugin ")
    if name == origin or not registry.has("extension", name):
        return problem
    start = f"{problem.way_out.rstrip('.')}, or name" if problem.way_out else "Name"
    return evolve(problem, way_out=f"{start} {name!r} in plugins.disable.")


def _placement(config: Config, platform: Platform) -> Placement:
    placement = platform.placement(config)
    if not 0 <= placement.output_rank < placement.num_workers:
        raise PluginError(
            f"platform {platform.name!r} places {placement.num_workers} workers with output rank "
            f"{placement.output_rank}; it must place at least one, and the output rank among them"
        )
    return placement


def _platform_problems(config: Config, platform: Platform) -> tuple[Problem, ...]:
    try:
        return tuple(platform.check(config))
    except Exception as error:
        raise PluginError(
            f"platform {platform.name!r} could not check the configuration: "
            f"{type(error).__name__}: {error}"
        ) from error


def capability_problems(config: Config, platform: Platform) -> list[Problem]:
    """Return a Problem for each key that needs what ``platform`` cannot do."""
    return [
        Problem(
            key=path,
            value=get(config, path),
            message=f"platform {platform.name!r} does not support {capability.value} "
            f"({platform.support(capability).value}).",
            way_out=f"Set {path} = {str(harmless).lower()}, or choose another platform.",
        )
        for path, harmless, capability in NEEDS
        if get(config, path) != harmless and platform.support(capability) is not Support.YES
    ]


def _one_of(case: Case, path: str, allowed: tuple[Any, ...], what: str) -> Iterator[Problem]:
    if get(case.config, path) not in allowed:
        listed = ", ".join(map(str, allowed))
        yield case.problem(
            path, f"platform {case.platform.name!r} offers no such {what}.", f"It offers {listed}."
        )


def _types(case: Case) -> Iterator[Problem]:
    limits = case.limits
    yield from _one_of(case, "dtype", limits.dtypes, "type")
    cached = (*limits.dtypes, *limits.kv_cache_dtypes)
    yield from _one_of(case, "kv_cache_dtype", cached, "type")


def _cache(case: Case) -> Iterator[Problem]:
    cache, limits = case.config.cache, case.limits
    yield from _one_of(case, "block_size", limits.block_sizes, "block size")
    if cache.num_kv_blocks is not None:
        if cache.num_kv_blocks <= limits.reserved_blocks:
            yield case.problem(
                "num_kv_blocks",
                f"platform {case.platform.name!r} keeps {limits.reserved_blocks} for itself.",
                f"Give at least {limits.reserved_blocks + 1}, or leave it out.",
            )
        if cache.kv_cache_memory_bytes is not None:
            yield case.problem(
                "num_kv_blocks", "kv_cache_memory_bytes is set too.", "Set one of the two."
            )


def _bounded(case: Case, path: str, bound: int | None) -> Iterator[Problem]:
    value = get(case.config, path)
    if bound is not None and value is not None and value > bound:
        yield case.problem(
            path, f"platform {case.platform.name!r} can do at most {bound}.", "Lower it."
        )


def _scheduling(case: Case) -> Iterator[Problem]:
    scheduler, limits = case.config.scheduler, case.limits
    yield from _bounded(case, "max_num_seqs", limits.max_num_seqs)
    yield from _bounded(case, "max_num_batched_tokens", limits.max_num_batched_tokens)
    chunk, tokens = scheduler.prefill_chunk_size, scheduler.max_num_batched_tokens
    if case.supports(Capability.CHUNKED_PREFILL):
        yield from _chunks(case, chunk, tokens)
    elif chunk is not None:
        yield case.problem(
            "prefill_chunk_size",
            f"platform {case.platform.name!r} computes each prompt in one step.",
            "Leave it out.",
        )
    if scheduler.async_scheduling and case.supports(Capability.ASYNC_SCHEDULING):
        yield from _asynchronous(case)


def _sampling(case: Case) -> Iterator[Problem]:
    processors = case.config.sampling.logits_processors
    if processors and case.config.speculative.num_speculative_tokens:
        yield case.problem(
            "logits_processors",
            "drafts are judged several tokens at a time, and processors see one.",
            "Set num_speculative_tokens = 0, or leave them out.",
        )


def _asynchronous(case: Case) -> Iterator[Problem]:
    executor = case.executor_class
    if not case.limits.async_scheduling:
        yield case.problem(
            "async_scheduling",
            f"platform {case.platform.name!r} cannot do it with this configuration.",
            "Leave it out.",
        )
    if executor is not None and not executor.supports_async_scheduling:
        yield case.problem(
            "async_scheduling",
            f"executor {executor.__name__} takes no step beside those of the stages.",
            "Leave it out, or choose another executor.",
        )


def _chunks(case: Case, chunk: int | None, tokens: int | None) -> Iterator[Problem]:
    multiple = case.limits.chunk_multiple
    if chunk is not None and chunk % multiple:
        yield case.problem(
            "prefill_chunk_size",
            f"platform {case.platform.name!r} takes multiples of {multiple}.",
            f"Use {max(chunk // multiple, 1) * multiple}.",
        )
    if tokens is not None and tokens < multiple:
        yield case.problem(
            "max_num_batched_tokens",
            f"platform {case.platform.name!r} computes at least {multiple} tokens of a prompt.",
            f"Use {multiple} or more.",
        )


def _model(case: Case) -> Iterator[Problem]:
    description, length = case.config.description, case.config.model.max_model_len
    if description is None:
        return
    sizes = case.limits.head_sizes
    if sizes and description.head_size not in sizes:
        yield case.problem(
            "model",
            f"its heads have {description.head_size} elements; platform {case.platform.name!r} "
            f"can do {', '.join(map(str, sizes))}.",
            "Choose another model or platform.",
        )
    if length is not None and length > description.context_length:
        yield case.problem(
            "max_model_len",
            f"the model's context is {description.context_length} tokens.",
            "Lower it, or leave it out.",
        )
    longest = length or description.context_length
    tokens = case.config.scheduler.max_num_batched_tokens
    if not case.supports(Capability.CHUNKED_PREFILL) and tokens is not None and tokens < longest:
        yield case.problem(
            "max_num_batched_tokens",
            f"platform {case.platform.name!r} computes each prompt in one step, and one may have "
            f"{longest} tokens.",
            f"Raise it to {longest}, or lower max_model_len.",
        )


def _parallel(case: Case) -> Iterator[Problem]:
    parallel, description = case.config.parallel, case.config.description
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if description is not None:
        heads, kv_heads = description.num_heads, description.num_kv_heads
        if tensor > heads or (tensor > kv_heads and tensor % kv_heads):
            yield case.problem(
                "tensor_parallel_size",
                f"the model has {heads} query and {kv_heads} key-value heads.",
                f"Use at most {kv_heads}, or a multiple of it up to {heads}.",
            )
        if stages > description.num_layers:
            yield case.problem(
                "pipeline_parallel_size",
                f"the model has {description.num_layers} layers.",
                "Use at most as many stages.",
            )
        yield from _saved_shards(case)
    executor = case.executor_class
    if stages > 1 and executor is not None and not executor.supports_pp:
        yield case.problem(
            "pipeline_parallel_size",
            f"executor {executor.__name__} cannot spread pipeline stages.",
            "Choose another executor.",
        )
    if parallel.nnodes > case.placement.num_workers:
        yield case.problem(
            "nnodes",
            f"there are only {case.placement.num_workers} workers to spread.",
            "Use at most one host for each worker.",
        )


def _saved_shards(case: Case) -> Iterator[Problem]:
    """Ranks load what ranks saved, so there must be as many of each kind."""
    from hardpoint.checkpoints.sharded_state import SHARDED_STATE, read_manifest

    description = case.config.description
    if description is None or description.format != SHARDED_STATE:
        return
    manifest = read_manifest(description.path)
    different = manifest.differs(case.config.parallel, case.placement.num_workers)
    if different is not None:
        path, saved = different
        yield case.problem(
            path,
            f"the sharded state in {description.path} was saved by "
            f"{manifest.tensor_parallel_size} tensor shards and "
            f"{manifest.pipeline_parallel_size} pipeline stages.",
            f"Set {path} = {saved}, or load the original model.",
        )


def _devices(case: Case) -> Iterator[Problem]:
    devices = case.config.device.devices
    if devices is None:
        return
    needed = case.placement.num_workers * case.placement.devices_per_worker
    if len(set(devices)) != len(devices):
        yield case.problem("devices", "names one device twice.", "Name each once.")
    elif len(devices) < needed:
        yield case.problem(
            "devices",
            f"{case.placement.num_workers} workers need {needed} devices.",
            "Name more, or lower the parallel sizes.",
        )


def _extensions(config: Config, registry: Registry) -> Iterator[Problem]:
    """The extensions that replace a class must be there; they are asked when workers start."""
    for path in ("worker", "model_runner"):
        name = get(config, path)
        if name is not None and not registry.has("extension", name):
            known = registry.names("extension")
            listed = f"Installed are {', '.join(known)}." if known else "None is installed."
            yield Problem(
                key=path,
                value=name,
                message="no extension of that name is installed.",
                way_out=did_you_mean(name, known, listed),
            )


def _graphs(case: Case) -> Iterator[Problem]:
    """Without the capability, graphs can only be left out."""
    if case.config.graph.graph_mode not in (None, "none") and not case.supports(Capability.GRAPHS):
        yield case.problem(
            "graph_mode",
            f"platform {case.platform.name!r} does not support graphs "
            f"({case.platform.support(Capability.GRAPHS).value}).",
            "Set graph_mode = none, or choose another platform.",
        )


def _graph_policy(config: Config, registry: Registry, platform: Platform) -> Iterator[Problem]:
    """The policy must be offered; workers make it when they plan their graphs."""
    name = config.graph.graph_policy
    offers = {} if name is None else registry.offers("hardpoint_graph_policies", platform.name)
    if name is not None and name not in offers:
        listed = f"Offered are: {', '.join(sorted(offers))}." if offers else "No plugin offers any."
        yield Problem(
            key="graph_policy",
            value=name,
            message="there is no such policy of graphs.",
            way_out=did_you_mean(name, offers, listed),
        )


def _quantization(config: Config, registry: Registry, platform: Platform) -> Iterator[Problem]:
    """The quantisation must be offered; workers make it when they load the model."""
    name = config.model.quantization
    offers = {} if name is None else registry.offers("hardpoint_quantizations", platform.name)
    if name is not None and name not in offers:
        listed = f"It offers: {', '.join(sorted(offers))}." if offers else "It offers none."
        yield Problem(
            key="quantization",
            value=name,
            message=f"platform {platform.name!r} offers no such quantisation.",
            way_out=did_you_mean(name, offers, listed),
        )
