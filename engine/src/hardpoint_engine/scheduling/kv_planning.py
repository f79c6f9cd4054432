"""How many KV blocks there are, how layers share them, and how long a request may be.

Pure: from what the workers report to what they shall allocate. Sizes are in bytes, lengths in
tokens. All ranks get the same number of blocks, because one block id means the same positions on
all of them; so the rank where blocks are dearest for its memory decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import define, field, frozen
from hardpoint.errors import ConfigError, MemoryBudgetError, UnsupportedError
from hardpoint.kv_cache import (
    KVCacheConfig,
    KVCacheGroup,
    KVCacheKind,
    KVCacheSpec,
    KVCacheTensor,
)
from hardpoint.records import Problem

Specs = Mapping[str, KVCacheSpec]
"""One rank's layers: name -> spec."""

PLANNED_KINDS = (KVCacheKind.FULL, KVCacheKind.SLIDING, KVCacheKind.CHUNKED, KVCacheKind.MLA)
"""Block rules served here: each keeps a block for every position (a window only masks)."""


@frozen(kw_only=True)
class KVPlan:
    """The cache of the whole group of workers. ``configs[rank]`` is what that rank allocates;
    ``reserved`` of the ``num_blocks`` blocks are not for requests.
    """

    configs: tuple[KVCacheConfig, ...]
    num_blocks: int
    block_size: int
    num_groups: int
    reserved: int

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - self.reserved

    @property
    def capacity(self) -> int:
        """Tokens that requests can hold, all together."""
        return self.num_usable * self.block_size


@define(eq=False)
class _Group:
    """Layers of one rule on all ranks: rank -> the one spec there, and rank -> its layers."""

    rule: tuple[object, ...]
    specs: dict[int, KVCacheSpec] = field(factory=dict)
    layers: dict[int, list[str]] = field(factory=dict)

    def takes(self, rule: tuple[object, ...], by_rank: Mapping[int, KVCacheSpec]) -> bool:
        return rule == self.rule and all(
            self.specs.get(rank, spec) == spec for rank, spec in by_rank.items()
        )

    def add(self, name: str, by_rank: Mapping[int, KVCacheSpec]) -> None:
        for rank, spec in by_rank.items():
            self.specs[rank] = spec
            self.layers.setdefault(rank, []).append(name)

    def on(self, rank: int) -> KVCacheGroup:
        """Return this rank's part; a rank without such layers has an empty one in its place."""
        spec = self.specs.get(rank) or next(iter(self.specs.values()))
        return KVCacheGroup(layers=tuple(self.layers.get(rank, ())), spec=spec)


def plan_kv_cache(
    specs: Sequence[Specs],
    available: Sequence[int] | None,
    *,
    reserved: int = 1,
    num_blocks: int | None = None,
) -> KVPlan:
    """Plan the caches of all ranks from their layers and the bytes ``available`` on each.

    An explicit ``num_blocks`` is taken as it is, and ``available`` may be None then. A layer's name
    means the same layer on every rank that has it; ranks may differ in key-value heads. Raises
    MemoryBudgetError with the figures if not even one block can be used, UnsupportedError for
    layers whose rule is not served here.
    """
    groups = _grouped(specs)
    block_size = _common_block_size(groups)
    if num_blocks is None:
        num_blocks = _fitting_blocks(specs, available or (), reserved)
    if num_blocks <= reserved:
        raise MemoryBudgetError(
            f"{num_blocks} KV blocks, {reserved} of them reserved, leave none for requests: "
            f"raise num_kv_blocks to at least {reserved + 1}"
        )
    configs = tuple(
        KVCacheConfig(
            num_blocks=num_blocks,
            groups=tuple(group.on(rank) for group in groups),
            tensors=tuple(
                KVCacheTensor(num_bytes=spec.page_bytes * num_blocks, layers=(name,))
                for name, spec in layers.items()
            ),
        )
        for rank, layers in enumerate(specs)
    )
    return KVPlan(
        configs=configs,
        num_blocks=num_blocks,
        block_size=block_size,
        num_groups=len(groups),
        reserved=reserved,
    )


def _grouped(specs: Sequence[Specs]) -> list[_Group]:
    by_layer: dict[str, dict[int, KVCacheSpec]] = {}
    for rank, layers in enumerate(specs):
        for name, spec in layers.items():
            by_layer.setdefault(name, {})[rank] = spec
    groups: list[_Group] = []
    for name, by_rank in by_layer.items():
        rules = {_rule(spec) for spec in by_rank.values()}
        if len(rules) != 1:
            raise ConfigError(f"ranks disagree on the KV cache of layer {name!r}: {by_rank}")
        rule = rules.pop()
        group = next((group for group in groups if group.takes(rule, by_rank)), None)
        if group is None:
            groups.append(group := _Group(rule))
        group.add(name, by_rank)
    if not groups:
        raise UnsupportedError(
            "models without a KV cache", "hardpoint-engine", reason="no worker reports a layer"
        )
    return groups


def _rule(spec: KVCacheSpec) -> tuple[object, ...]:
    """Return what must be equal for layers to share a block table."""
    if spec.follows not in PLANNED_KINDS:
        raise UnsupportedError(
            f"KV cache layers of kind {spec.kind!r}",
            "hardpoint-engine",
            reason=f"their block rule is {spec.follows.value!r}",
            hint=f"Served are {', '.join(kind.value for kind in PLANNED_KINDS)}.",
        )
    return (spec.kind, spec.follows, spec.window, spec.block_size, spec.dtype)


def _common_block_size(groups: Sequence[_Group]) -> int:
    sizes = {group.on(0).spec.block_size for group in groups}
    if len(sizes) != 1:
        raise UnsupportedError(
            "KV cache groups of different block sizes",
            "hardpoint-engine",
            reason=f"the workers report {sorted(sizes)}",
        )
    return sizes.pop()


def _fitting_blocks(specs: Sequence[Specs], available: Sequence[int], reserved: int) -> int:
    fitting: list[int] = []
    figures: list[str] = []
    for rank, (layers, room) in enumerate(zip(specs, available, strict=True)):
        block_bytes = sum(spec.page_bytes for spec in layers.values())
        if block_bytes:
            fitting.append(max(0, room // block_bytes))
            figures.append(f"rank {rank}: {room} bytes available, {block_bytes} bytes a block")
    if min(fitting) <= reserved:
        needed = reserved + 1
        raise MemoryBudgetError(
            f"no room for the KV cache: it needs at least {needed} blocks, {reserved} of them "
            f"reserved ({'; '.join(figures)}). A negative figure means that the model alone is too "
            "large. Raise memory_utilization, set kv_cache_memory_bytes, or free memory."
        )
    return min(fitting)


def fit_model_len(
    plan: KVPlan, requested: int | None, context: int, *, longest_prompt: int | None = None
) -> int:
    """Return the longest request in tokens, answer included.

    ``requested`` is what somebody asked for, and is given or refused: ConfigError above the model's
    ``context``, MemoryBudgetError above what the cache holds for one request. Unset, it is the
    least of both and of ``longest_prompt`` (the step's budget on platforms that compute a prompt in
    one step).
    """
    if requested is None:
        return min(context, plan.capacity, longest_prompt or context)
    if requested > context:
        problem = Problem(
            key="max_model_len",
            value=requested,
            message=f"the model's context is {context} tokens.",
            way_out="Lower it, or leave it out.",
        )
        raise ConfigError(str(problem), problems=(problem,))
    if requested > plan.capacity:
        blocks = -(-requested // plan.block_size)
        raise MemoryBudgetError(
            f"max_model_len = {requested}: one such request needs {blocks} KV blocks of "
            f"{plan.block_size} tokens, and the cache has {plan.num_usable} for requests "
            f"({plan.capacity} tokens, {plan.num_blocks} blocks of {_block_bytes(plan)} bytes with "
            f"{plan.reserved} reserved). Lower max_model_len to {plan.capacity} or less, leave it "
            "out, or raise num_kv_blocks, kv_cache_memory_bytes or memory_utilization."
        )
    return requested


def _block_bytes(plan: KVPlan) -> int:
    """Return the bytes of one block on the rank where it takes most."""
    return max(
        sum(tensor.num_bytes for tensor in config.tensors) // plan.num_blocks
        for config in plan.configs
    )
