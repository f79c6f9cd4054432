"""The cpu platform as the driver sees it: touches nothing, imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from hardpoint.capabilities import Capability, Support
from hardpoint.platform import Platform, RequestView
from hardpoint.procfs import ROOT, read
from hardpoint.records import Device, Limits, Placement, Problem, Verdict
from hardpoint_runtime.offered import declared

from hardpoint_cpu import memory, threads
from hardpoint_cpu.native import library
from hardpoint_cpu.native.expectations import slow_way, why_no_program
from hardpoint_cpu.settings import CpuSettings

if TYPE_CHECKING:
    from pathlib import Path

    from hardpoint.config import Config

PROGRAMS = "Leave it out, or see that plugins.cpu.native = 'on' can be had."
"""The way out of what only native programs do."""

NATIVE_BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Processor flags (x86, Arm) of instructions that multiply bfloat16."""


class CpuPlatform(Platform):
    """The host's own processors and memory. Always there where torch is."""

    name: ClassVar[str] = "cpu"
    worker_class: ClassVar[str] = "hardpoint_cpu.worker:CpuWorker"
    model_runner_class: ClassVar[str] = "hardpoint_cpu.model_runner:CpuModelRunner"
    capabilities: ClassVar[Mapping[Capability, Support]] = declared(Capability.BATCH_INVARIANCE)
    preload: ClassVar[tuple[str, ...]] = (
        "torch",
        "hardpoint_cpu.worker",
        "hardpoint_cpu.model_runner",
    )
    support_level: ClassVar[str] = "L4"
    reference_keys: ClassVar[Mapping[str, object]] = {"plugins.cpu.native": "off"}
    root: ClassVar[Path] = ROOT
    """Where the kernel's files are found."""

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings if settings is not None else CpuSettings())
        self._invariant = False

    @property
    def options(self) -> CpuSettings:
        """The settings, typed."""
        return cast("CpuSettings", self.settings)

    def probe(self) -> Verdict:
        """Say what cores and memory there are; looks for torch without importing it."""
        if importlib.util.find_spec("torch") is None:
            return Verdict(available=False, reason="the package torch is not installed")
        cores = threads.usable_cores(self.root)
        host = memory.host_memory(self.root)
        limited = "" if cores.quota is None else f" (a quota leaves time for {cores.quota:g})"
        return Verdict(
            available=True,
            reason=(
                f"{len(cores.ids)} cores{limited}, {host.total / 2**30:.1f} GiB of memory as set "
                f"by {host.source}; {self._how_steps_run()}"
            ),
            devices=(Device(id="0", name="host", memory_bytes=host.total),),
        )

    def limits(self, config: Config) -> Limits:
        """Return what can be executed.

        ``dtype = auto`` is the stored type where that is computed natively, by the processor or by
        a native program (which widens it), else float32: through torch, weights stored in bfloat16
        are held and computed in float32, exactly, on processors that do not multiply bfloat16
        themselves, where it is both faster and more exact and takes twice the memory. Float16
        weights are unpacked to float32, block-quantised ones where no program computes with them.
        """
        stored = None if config.description is None else config.description.stored_dtype
        narrow = stored == "bfloat16" and (
            self._expects_program(config) or self._multiplies_bfloat16()
        )
        return Limits(
            dtypes=("float32", "bfloat16"),
            default_dtype="bfloat16" if narrow else "float32",
            block_sizes=(16, 32, 64, 128, 256, 8, 4, 2, 1),
            kv_cache_dtypes=("int8",),
        )

    def placement(self, config: Config) -> Placement:
        """One worker for each rank, on its share of the cores."""
        parallel = config.parallel
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return Placement(
            num_workers=ranks,
            resources_per_worker={"CPU": float(self.options.threads or 1)},
            output_rank=ranks - parallel.tensor_parallel_size,
            num_hosts=parallel.nnodes,
        )

    def check(self, config: Config) -> Sequence[Problem]:
        """Return what of the plugin's own settings cannot be honoured."""
        options = self.options
        found = threads.problems(options, threads.usable_cores(self.root))
        available = library.availability()
        found += library.problems(options, available)
        found += _packing_problems(config.model.quantization, options, available)
        self._invariant = config.model.batch_invariant
        return [*found, *_invariance_problems(config, options, available)]

    def check_request(self, request: RequestView) -> Problem | None:
        """Refuse scores of prompts, which come through torch, in a run that is batch invariant."""
        scores = request.sampling.prompt_logprobs
        if self._invariant and scores is not None:
            return Problem(
                key="prompt_logprobs",
                value=scores,
                message="batch_invariant is set, and scores of prompts are computed by torch, "
                "which rounds by what is computed together.",
                way_out="Leave one of the two out.",
            )
        return super().check_request(request)

    def remarks(self, config: Config) -> Sequence[str]:
        """Say that steps would run through torch, and why, where a native program was possible."""
        options = self.options
        if options.native != "auto":
            return ()
        reason = library.availability().reason or why_no_program(config)
        return () if reason is None or config.graph.graph_mode == "none" else (slow_way(reason),)

    def _how_steps_run(self) -> str:
        """Return what the doctor says of native programs: which are used, or why none."""
        options, available = self.options, library.availability()
        if reason := _without_programs(options, available):
            return f"steps run through torch: {reason}"
        level = available.best if options.native_level == "auto" else options.native_level
        lacking = library.LEVELS[library.LEVELS.index(available.best) + 1 :]
        if lacking:
            level = f"{level} instructions (this processor or build has no {' or '.join(lacking)})"
        else:
            level = f"{level} instructions"
        return f"steps run as native programs of {level}, where a model can be one"

    def _expects_program(self, config: Config) -> bool:
        """Whether steps will run as a native program, as far as can be told before loading."""
        without = _without_programs(self.options, library.availability())
        return not without and why_no_program(config) is None

    def _multiplies_bfloat16(self) -> bool:
        flags = (read(self.root / "proc/cpuinfo") or "").split()
        return any(flag in flags for flag in NATIVE_BFLOAT16)


def _packing_problems(
    quantization: str | None, settings: CpuSettings, available: library.Availability
) -> list[Problem]:
    """Return why weights cannot be packed as ``quantization`` says: the library packs them."""
    reason = _without_programs(settings, available)
    if quantization is None or not reason:
        return []
    return [
        Problem(
            key="quantization",
            value=quantization,
            message=f"{reason}.",
            way_out=PROGRAMS,
        )
    ]


def _invariance_problems(
    config: Config, settings: CpuSettings, available: library.Availability
) -> list[Problem]:
    """Return why a request's numbers cannot be the same bits in any batch, where that is asked for:
    native programs compute so, and sums over shards in the order of the shards.
    """
    if not config.model.batch_invariant:
        return []
    parallel, found = config.parallel, []
    if reason := _without_programs(settings, available):
        found.append((f"{reason}, and torch rounds by what is computed together.", PROGRAMS))
    elsewhere = settings.collectives == "gloo" or parallel.nnodes > 1 or sys.platform != "linux"
    if parallel.tensor_parallel_size > 2 and elsewhere:
        found.append(
            ("gloo sums more than two shards in no order of its own.", "Take two shards at most.")
        )
    return [
        Problem(key="batch_invariant", value=True, message=message, way_out=way_out)
        for message, way_out in found
    ]


def _without_programs(settings: CpuSettings, available: library.Availability) -> str:
    """Return why there are no native programs, an empty text where there can be."""
    return "native programs are off" if settings.native == "off" else available.reason
