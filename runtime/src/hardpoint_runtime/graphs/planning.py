"""From an engine's configuration to its plan of graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.references import checked_class
from hardpoint.references import resolve as resolve_reference

from hardpoint_runtime.graphs.keys import KeyRules, lora_cases
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import GraphPlan
from hardpoint_runtime.graphs.policy import DispatchPolicy
from hardpoint_runtime.graphs.resolution import AttentionSupport, resolve
from hardpoint_runtime.graphs.sizes import capture_sizes

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry

    from hardpoint_runtime.device import DeviceOps

_logger = logging.getLogger("hardpoint.graphs")


def plan_graphs(
    config: Config,
    registry: Registry,
    platform_name: str,
    device: DeviceOps,
    *,
    support: AttentionSupport,
    splittable: bool = True,
    forbidden: Mapping[GraphMode, str] | None = None,
    default: GraphMode = GraphMode.NONE,
) -> GraphPlan:
    """Return the plan of graphs of one rank. Called by the runner, before it warms up.

    ``default`` is the mode where ``graph_mode`` is unset. The rest as in
    :func:`hardpoint_runtime.graphs.resolution.resolve`. Every step down from the mode that is not
    the user's is logged; one from the user's raises ConfigError, as do sizes that cannot be.
    """
    name = config.graph.graph_mode
    asked = default if name is None else GraphMode.named(name)
    query = 1 + config.speculative.num_speculative_tokens
    resolved = resolve(
        asked, support, uniform_query=query, splittable=splittable, forbidden=forbidden
    )
    if config.is_explicit("graph_mode"):
        resolved.require(asked)
    for reason in resolved.reasons:
        _logger.warning("graph_mode %s: %s", asked.value, reason)
    if resolved.mode is GraphMode.NONE:
        return GraphPlan.eager()
    max_num_seqs = config.scheduler.max_num_seqs or 1
    max_num_batched_tokens = config.scheduler.max_num_batched_tokens or max_num_seqs * query
    sizes = capture_sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        uniform_query=query,
        given=config.graph.graph_sizes,
        preferred=device.buckets(max_num_batched_tokens),
    )
    if not sizes.sizes:
        if config.is_explicit("graph_mode"):
            raise ConfigError(
                f"graph_mode = {name!r}, and graph_sizes = [] leaves no graph to make: leave "
                "graph_sizes out, or set graph_mode = 'none'"
            )
        return GraphPlan.eager()
    rules = KeyRules(
        max_num_seqs=max_num_seqs,
        uniform_query=query,
        lora_cases=lora_cases(config.lora.max_loras, specialise=config.graph.graph_per_lora_count),
    )
    return GraphPlan.make(
        resolved.mode,
        sizes,
        rules,
        policy=make_policy(config, registry, platform_name),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def make_policy(config: Config, registry: Registry, platform_name: str) -> DispatchPolicy:
    """Build the policy that the key ``graph_policy`` names, the built-in one where it names none.

    Raises PluginNotFoundError for a name that nobody offers, WrongClassError for a class that is
    no DispatchPolicy.
    """
    name = config.graph.graph_policy
    if name is None:
        return DispatchPolicy()
    offer = registry.offers("hardpoint_graph_policies", platform_name).get(name)
    if offer is None:
        raise PluginNotFoundError(f"graph_policy = {name!r}: no plugin in this worker offers it")
    origin = f"graph_policy = {name!r}, which is {offer.reference!r},"
    kind = checked_class(resolve_reference(offer.reference), DispatchPolicy, origin)
    policy: DispatchPolicy = kind()
    return policy
