"""The runner of accelerators: the toolkit's, with weights and cache in pools that can sleep."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve
from hardpoint.checkpoints import read_description
from hardpoint.errors import UnsupportedError
from hardpoint.records import LoadReport, WarmUpReport

from hardpoint_runtime.accelerator.graph_memory import graph_memory
from hardpoint_runtime.accelerator.graphs import any_living
from hardpoint_runtime.description import described
from hardpoint_runtime.graphs.steps import StepGraphs
from hardpoint_runtime.model_runner import TorchModelRunner
from hardpoint_runtime.warm_up import single_block_plan

if TYPE_CHECKING:
    from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
    from hardpoint_runtime.models import LanguageModel
    from hardpoint_runtime.operations import Operations

_logger = logging.getLogger("hardpoint.graphs")
_worker_logger = logging.getLogger("hardpoint.worker")

WEIGHTS = "weights"
"""The tag of what a model holds: its parameters and buffers."""


class AcceleratorModelRunner(TorchModelRunner):
    """Executes steps of one model on one accelerator. ``graph_memory`` is what was set aside for
    graphs when the KV cache was sized, in bytes.
    """

    graph_memory: int | None = None
    outside = 0
    """The bytes of weights that lie in no pool, though there are pools: they do not sleep."""

    @property
    def port(self) -> AcceleratorDeviceOps:
        """The device, typed."""
        return cast("AcceleratorDeviceOps", self.device)

    # Weights.

    def make_model(self, operations: Operations) -> LanguageModel:
        """Construct the model in the pool of the weights."""
        with self.device.pool(WEIGHTS):
            return super().make_model(operations)

    def load_weights(self, model: LanguageModel) -> None:
        """Load in that pool, and move into it what was made elsewhere meanwhile, as by packing."""
        with self.device.pool(WEIGHTS):
            super().load_weights(model)
        self._take_in(model)

    def reload_weights(self, path: str | None) -> LoadReport:
        """Read all weights again, in place, from ``path`` or from where they came.

        Raises CheckpointError for weights of other names or shapes, UnsupportedError for packed
        ones: they are made anew, at other addresses.
        """
        model, context, started = self.get_model(), self.context, time.perf_counter()
        packing = self.make_quantization(model)
        if packing is not None:
            raise UnsupportedError(
                f"reload_weights of weights that {type(packing).__name__} packs",
                f"platform {self.platform.name!r}",
                reason="they are packed into new memory while they are loaded",
                hint="Leave quantization unset, or start anew with the other weights.",
            )
        if path is not None:
            found = read_description(path, self.config.load.load_format)
            description = evolve(described(context), path=found.path, format=found.format)
            self.context = evolve(context, config=evolve(context.config, description=description))
        try:
            self.load_weights(model)
        finally:
            self.context = context
        self.device.synchronize()
        num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        return LoadReport(weight_bytes=num_bytes, seconds=time.perf_counter() - started)

    def _take_in(self, model: LanguageModel) -> None:
        pools, kind = self.port.pools, self.device.device.type
        if pools is None:
            return
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in model.named_modules():
            own = {
                **dict(module.named_parameters(recurse=False)),
                **dict(module.named_buffers(recurse=False)),
                **{k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)},
            }
            for name, tensor in own.items():
                if tensor.device.type == kind:
                    found.setdefault(id(tensor), (f"{path}.{name}", tensor))
        left = pools.take_in(WEIGHTS, dict(found.values()))
        self.outside = sum(each.numel() * each.element_size() for each in left.values())
        if left:
            told = ", ".join(sorted(left))
            _worker_logger.warning("%d bytes of weights do not sleep: %s", self.outside, told)

    def fixed_tensors(self) -> Iterator[torch.Tensor]:
        """Give what a model holds and no checkpoint brings again: its buffers."""
        yield from self.get_model().buffers()

    def woke(self, tags: Collection[str]) -> None:
        """Make memory that came back without its contents as it was when it was new.

        Called by the worker when a part of it has woken.
        """
        with self.device.inference():
            self.workspace.woke()
            if "kv_cache" in tags and self.kv_cache is not None:
                for cache in self.kv_cache.layers.values():
                    cache.key.zero_()
                    cache.value.zero_()

    # Graphs.

    def profile_graphs(self) -> int:
        """Return the bytes that the graphs of the plan will take, by capturing some of them with a
        KV cache of one block. All is given back, but for work space of libraries while other
        graphs live in the process. Called by the worker before the cache is sized.
        """
        plan = self.graph_plan
        if not plan.graphs or plan.any_shape:
            self.graph_memory = 0
            return 0
        cache = single_block_plan(self.get_kv_cache_spec())
        try:
            self.kv_cache = self.make_kv_cache(cache)
            self.builders = tuple(self.make_metadata_builders(cache))
            with self.device.inference():
                self.graph_memory = graph_memory(self, plan)
        finally:
            self.kv_cache, self.builders = None, ()
            self.workspace.unlock()
            if not any_living():
                self.port.release_workspaces()
            self.port.empty_cache()
        return self.graph_memory

    def warm_up(self) -> WarmUpReport:
        """Warm up; say whether graphs took more than was set aside for them."""
        report = super().warm_up()
        if isinstance(self.graphs, StepGraphs) and self.graph_memory is not None:
            taken = self.graphs.report.num_bytes
            told = "graphs took %d bytes of the %d that were set aside for them"
            level = logging.WARNING if taken > self.graph_memory else logging.INFO
            _logger.log(level, told, taken, self.graph_memory)
        return report
