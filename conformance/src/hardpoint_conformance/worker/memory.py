"""Reports of the start, cache specs, memory that is there and memory that is not."""

from __future__ import annotations

from hardpoint.errors import MemoryBudgetError
from hardpoint.kv_cache import DTYPE_BYTES, KVCacheSpec
from hardpoint.records import LoadReport
from hardpoint.worker import Worker

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.subject import plans
from hardpoint_conformance.suite import own_workers
from hardpoint_conformance.worker.part import WorkerPart


class MemoryTests(WorkerPart):
    """What a worker says of itself, held against what then happens."""

    def test_reports_of_the_start_make_sense(self) -> None:
        """Bytes of weights, seconds, tasks, layouts."""
        group = self.bench.executor
        reports = group.load_reports
        expect(
            len(reports) == group.world_size
            and all(isinstance(r, LoadReport) and r.weight_bytes > 0 for r in reports),
            "load_model reports the bytes of weights that this worker holds", seen=reports,
            where=LoadReport, do="Sum the bytes of the tensors on the device.",
        )  # fmt: skip
        expect(
            "generate" in group.supported_tasks() and group.get_kv_cache_layout(),
            "a worker says what the model can do and which cache layouts it can use",
            seen=(group.supported_tasks(), group.get_kv_cache_layout()),
            where=Worker.supported_tasks, do="Return ('generate',) at least.",
        )  # fmt: skip

    def test_the_kv_cache_specs_describe_the_model(self) -> None:
        """A spec for each layer; bytes that add up."""
        bench = self.bench
        description, group = bench.description, bench.executor
        block = group.config.cache.block_size
        for specs, size in zip(
            group.get_kv_cache_specs(), group.collective_rpc("get_cache_block_size_bytes"),
            strict=True,
        ):  # fmt: skip
            sound = all(
                isinstance(spec, KVCacheSpec) and spec.block_size == block and spec.page_bytes > 0
                and spec.dtype in DTYPE_BYTES
                for spec in specs.values()
            )  # fmt: skip
            expect(
                sound and len(specs) <= description.num_layers,
                f"each layer of this rank has a spec, with blocks of {block} tokens", seen=specs,
                where=Worker.get_kv_cache_spec, do="Use config.cache.block_size.",
            )  # fmt: skip
            expect_equal(
                size, sum(spec.page_bytes for spec in specs.values()),
                "a block's bytes are the sum of its pages'",
                where=Worker.get_cache_block_size_bytes, do="Leave it to the base class.",
            )  # fmt: skip

    @own_workers
    def test_the_memory_that_is_reported_can_be_had(self) -> None:
        """At least what the kit's small cache takes; a whole number of bytes."""
        group = self.subject.start()
        wanted = sum(tensor.num_bytes for tensor in plans(group)[0].tensors)
        for rank, free in enumerate(group.determine_available_memory()):
            expect(
                type(free) is int and free >= wanted,
                "determine_available_memory returns the bytes that the KV cache may use",
                seen=f"rank {rank}: {free!r}, and {wanted} are needed",
                where=Worker.determine_available_memory, do="Measure after loading, in bytes.",
            )  # fmt: skip
            devices = [device.memory_bytes for device in group.platform.probe().devices]
            share = group.placement.devices_per_worker
            if devices and None not in devices:
                most = share * max(size or 0 for size in devices)
                expect(
                    free <= most, "no more memory is available than the devices have",
                    seen=f"rank {rank}: {free} bytes, and its devices have {most} in all",
                    where=Worker.determine_available_memory, do="Look whether free and total are "
                    "swapped, and at their units.",
                )  # fmt: skip
        self.subject.end(group)

    @own_workers
    def test_a_cache_that_cannot_fit_is_a_memory_budget_error(self) -> None:
        """The OOM of the contract has one type, with the figures in bytes."""
        group = self.subject.start()
        free = min(group.determine_available_memory())
        page = max(1, *group.collective_rpc("get_cache_block_size_bytes"))
        huge = plans(group, num_blocks=16 * max(free, 1 << 44) // page)
        error = expect_raises(
            MemoryBudgetError, lambda: group.initialize_from_config(huge),
            "memory that is not there is a MemoryBudgetError with the figures",
            where=MemoryBudgetError,
            do="Compare with what is free before you allocate; raise MemoryBudgetError.",
        )  # fmt: skip
        expect(
            any(char.isdigit() for char in str(error)), "the error has figures", seen=str(error),
            where=MemoryBudgetError, do="Say how many bytes were asked for and are free.",
        )  # fmt: skip
        self.subject.end(group)

    def test_the_environment_that_was_declared_is_there(self) -> None:
        """In every worker, before anything heavy was imported."""
        group = self.bench.executor
        declared = dict(group.platform.environment(group.config, group.placement))
        for rank, seen in enumerate(
            group.collective_rpc(in_worker.environment, args=(tuple(declared),))
        ):
            expect_equal(
                seen, declared, f"every worker has the variables of Platform.environment (rank "
                f"{rank})", where="hardpoint.platform.Platform.environment",
                do="Change no variable in the worker that the platform declares.",
            )  # fmt: skip
