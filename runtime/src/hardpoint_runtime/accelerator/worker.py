"""The worker of accelerators: takes the rank's device, accounts for its memory, and sleeps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.errors import LifecycleError, MemoryBudgetError, UnsupportedError

from hardpoint_runtime.accelerator.device import AcceleratorDeviceOps
from hardpoint_runtime.accelerator.memory import MemoryProfile, MemorySnapshot
from hardpoint_runtime.accelerator.model_runner import WEIGHTS, AcceleratorModelRunner
from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps
from hardpoint_runtime.device import DeviceOps
from hardpoint_runtime.worker import TorchWorker

if TYPE_CHECKING:
    from hardpoint.kv_cache import KVCacheConfig
    from hardpoint.records import LoadReport, SleepReport

    from hardpoint_runtime.accelerator.platform import AcceleratorPlatform
    from hardpoint_runtime.accelerator.pools import AddressKeepingPools

_logger = logging.getLogger("hardpoint.worker")

CACHE = "kv_cache"
SCRATCH = ("workspace", "graphs")
"""Tags of memory whose contents nobody needs between two steps."""


class AcceleratorWorker(TorchWorker):
    """One rank on one accelerator. Local rank i has the logical device i, under whatever mask the
    process was started: none is set here.

    After ``determine_available_memory``, ``memory_profile`` is the account behind its answer.
    """

    device_type: ClassVar[str] = ""
    """torch's name of the device; empty: the platform's name."""
    substitute_class: ClassVar[type[SubstituteDeviceOps]] = SubstituteDeviceOps
    """The port where host memory stands for the device."""

    baseline: MemorySnapshot | None = None
    memory_profile: MemoryProfile | None = None
    _weight_bytes = 0
    _fixed: tuple[torch.Tensor, ...] = ()
    """The model's buffers, on the host, while the weights sleep without a backup."""

    @property
    def torch_device(self) -> str:
        """What torch calls the device."""
        return self.device_type or self.platform.name

    @property
    def port(self) -> AcceleratorDeviceOps:
        """The device, typed; raises LifecycleError before ``init_device``."""
        return cast("AcceleratorDeviceOps", self._device("the device"))

    def make_device(self) -> AcceleratorDeviceOps:
        """Build the port to this rank's device, or to what stands for it."""
        platform = cast("AcceleratorPlatform", self.platform)
        if platform.on_substitute:
            return self.substitute_class.of(platform.accelerator_settings, self.device_index)
        return self.port_class()(self.torch_device, self.device_index, sleeps=platform.sleeps)

    def port_class(self) -> type[AcceleratorDeviceOps]:
        """Return what this rank's port is."""
        return AcceleratorDeviceOps

    # Memory.

    def load_model(self) -> LoadReport:
        """Load the model, in the pool of the weights."""
        report = super().load_model()
        self._weight_bytes = report.weight_bytes
        return report

    def determine_available_memory(self) -> int:
        """Return what the budget leaves beside the peak of the largest step, the graphs, and what
        libraries have taken since the device was.

        Other processes are free to take and give back memory meanwhile: what they take counts as
        the libraries', what they give back as nothing.
        """
        runner, device = self._runner("determine_available_memory"), self.port
        if self.baseline is None:
            raise LifecycleError("determine_available_memory was called before init_device")
        peak = device.peak_memory(runner.profile_run)
        device.empty_cache()
        other = max(0, device.snapshot().other - self.baseline.other)
        graphs = runner.profile_graphs() if isinstance(runner, AcceleratorModelRunner) else 0
        self.memory_profile = profile = MemoryProfile(
            budget=self.budget,
            weights=self._weight_bytes,
            peak=peak,
            other=other,
            graphs=graphs,
            rounding=device.rounding * len(runner.get_kv_cache_spec()),
        )
        level = logging.INFO if profile.available > 0 else logging.WARNING
        _logger.log(level, "rank %d: %s", self.rank, profile)
        return profile.available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache. Raises MemoryBudgetError with the account for one that the device
        has no room for.
        """
        wanted = sum(tensor.num_bytes for tensor in kv_cache_config.tensors)
        now = self.port.snapshot()
        if wanted > (room := now.free + now.reserved - now.allocated):
            account = f" ({self.memory_profile})" if self.memory_profile else ""
            raise MemoryBudgetError(
                f"a KV cache of {kv_cache_config.num_blocks} blocks needs {wanted} bytes, and "
                f"{room} of the {now.total} bytes of {self.port.device} are free{account}. Lower "
                "memory_utilization or num_kv_blocks"
            )
        super().initialize_from_config(kv_cache_config)

    # Sleep.

    def sleep(self, level: int) -> SleepReport:
        """Level 1: copy the weights to the host and free the device. Level 2: free it, and keep the
        model's buffers. Addresses stay, so that captured graphs are good again after waking.
        """
        keep = (WEIGHTS,) if level == 1 else ()
        return self._lie_down((WEIGHTS, CACHE, *SCRATCH), keep)

    def discard(self, tags: Sequence[str]) -> SleepReport:
        """Free the tags without a backup."""
        return self._lie_down(tags, ())

    def wake_up(self, tags: Sequence[str]) -> SleepReport:
        """Take memory again, at the same addresses: kept weights with what they held, the KV cache
        zeroed.
        """
        pools, runner = self._pools(), self._runner("wake_up")
        report = pools.wake((*tags, *SCRATCH))
        if WEIGHTS in tags and self._fixed:
            tensors = cast("AcceleratorModelRunner", runner).fixed_tensors()
            with self.port.inference():
                for tensor, kept in zip(tensors, self._fixed, strict=True):
                    tensor.copy_(kept)
            self._fixed = ()
        if isinstance(runner, AcceleratorModelRunner):
            runner.woke(tags)
        self.port.synchronize()
        return report

    def reload_weights(self, path: str | None = None) -> LoadReport:
        """Load all weights again, in place."""
        runner = self._runner("reload_weights")
        if not isinstance(runner, AcceleratorModelRunner):
            self._unsupported(Capability.WEIGHT_RELOAD)
        return runner.reload_weights(path)

    def shutdown(self) -> None:
        """Give back all memory, the pools' included."""
        pools = None if self.device is None else self.port.__dict__.get("pools")
        super().shutdown()
        if pools is not None:
            pools.close()

    def _lie_down(self, tags: Collection[str], keep: Collection[str]) -> SleepReport:
        pools, runner = self._pools(), self._runner("sleep")
        awake = WEIGHTS in tags and WEIGHTS not in keep and bool(pools.held([WEIGHTS]))
        if awake and isinstance(runner, AcceleratorModelRunner):
            self._fixed = tuple(self.port.to_host(each).clone() for each in runner.fixed_tensors())
        report = pools.sleep(tags, keep)
        outside = runner.outside if isinstance(runner, AcceleratorModelRunner) else 0
        return evolve(report, bytes_still_held=report.bytes_still_held + outside)

    def _pools(self) -> AddressKeepingPools:
        pools = self.port.pools
        if pools is not None:
            return pools
        if self.port.sleeps:
            self._unsupported(Capability.SLEEP)
        name = self.platform.name
        raise UnsupportedError(
            Capability.SLEEP.value, f"platform {name!r}",
            reason=f"plugins.{name}.sleep is off, so nothing lies in pools",
            hint=f"Set plugins.{name}.sleep to auto.",
        )  # fmt: skip

    # Within.

    def _budget(self, device: DeviceOps) -> int:
        """Note what is used before anything is loaded, then fix the budget. What torch keeps of
        an earlier engine in this process is given back first: it is free for this one.
        """
        port = cast("AcceleratorDeviceOps", device)
        port.empty_cache()
        self.baseline = port.snapshot()
        return super()._budget(device)
