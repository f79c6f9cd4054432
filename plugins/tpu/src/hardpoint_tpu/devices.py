"""The devices of a worker: taken from JAX, with their memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import jax
from hardpoint.errors import ConfigError
from hardpoint.records import Problem

from hardpoint_tpu.platform import LABEL, UNTRIED
from hardpoint_tpu.settings import TpuSettings

_logger = logging.getLogger("hardpoint.worker")


def take_devices(settings: TpuSettings, count: int, chosen: Sequence[str] = ()) -> list[jax.Device]:
    """Return the first ``count`` devices, or those of the logical ids ``chosen``.

    On the CPU, JAX is asked for as many virtual devices before it starts; it takes no more
    afterwards. Raises ConfigError if there are not enough.
    """
    if settings.backend == "cpu":
        _ask_for_virtual_devices(count)
    try:
        known = jax.devices(settings.backend)
    except RuntimeError as error:
        problem = Problem(
            key="plugins.tpu.backend", value=settings.backend, message=f"JAX has none: {error}."
        )
        raise ConfigError(str(problem), problems=(problem,)) from error
    ids = [_index(each, len(known)) for each in chosen] or list(range(count))
    if len(ids) < count or len(known) < count:
        raise _too_few(settings, count, len(known))
    label = LABEL if settings.backend == "cpu" else UNTRIED
    _logger.warning(
        "platform tpu on %d of %d %s devices: %s", count, len(known), settings.backend, label
    )
    return [known[index] for index in ids[:count]]


def _ask_for_virtual_devices(count: int) -> None:
    """Ask for ``count`` devices, unless JAX runs already or has been told a number otherwise."""
    if count == 1:
        return
    try:
        if jax.config.jax_num_cpu_devices < count:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        _logger.debug("JAX runs already, with the devices that it has")


def _index(chosen: str, known: int) -> int:
    if not chosen.isdigit() or int(chosen) >= known:
        problem = Problem(
            key="devices",
            value=chosen,
            message=f"the devices here are 0 to {known - 1}.",
            way_out="Name some of them.",
        )
        raise ConfigError(str(problem), problems=(problem,))
    return int(chosen)


def _too_few(settings: TpuSettings, count: int, known: int) -> ConfigError:
    way_out = "Lower it, or use a machine with more."
    if settings.backend == "cpu":
        way_out = (
            "JAX runs already in this process and takes no more. Start the process with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}, or use executor = 'mp'."
        )
    problem = Problem(
        key="tensor_parallel_size",
        value=count,
        message=f"JAX has {known} {settings.backend} devices.",
        way_out=way_out,
    )
    return ConfigError(str(problem), problems=(problem,))


def memory_limit(settings: TpuSettings, devices: Sequence[jax.Device], share: float) -> int:
    """Return the bytes that all ``devices`` together may hold: ``share`` of what each has; on the
    CPU, of the memory that stands for a device's own.
    """
    sizes = [settings.memory_bytes] * len(devices)
    if settings.backend != "cpu":
        stats = [device.memory_stats() or {} for device in devices]
        sizes = [int(each.get("bytes_limit", 0)) for each in stats]
    return math.floor(min(sizes) * share) * len(devices)
