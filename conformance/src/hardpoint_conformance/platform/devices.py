"""What a life leaves on the device and in the process; masks and assigned devices."""

from __future__ import annotations

import pytest
from hardpoint.executor import Executor
from hardpoint.platform import Platform

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.platform.part import PlatformPart
from hardpoint_conformance.probe import Probe
from hardpoint_conformance.subject import plans
from hardpoint_conformance.suite import not_applicable, own_workers
from hardpoint_conformance.watching import Traces, left_after, own_bytes

LARGE_CACHE = 128 << 20
"""Bytes of a KV cache that would be missed if a shutdown left it: a process has that much by chance
only if something holds it.
"""
MASKS = ("3,6", "GPU-8a6f1c9e-0003,GPU-8a6f1c9e-0006")


class DeviceTests(PlatformPart):
    """Memory back to the baseline; which devices are taken."""

    @own_workers
    def test_memory_is_back_to_the_baseline_after_every_life(self) -> None:
        """Twice over: what the device held before, what this process had open, and, where workers
        live in it, what it had of memory; each life has a large cache.
        """
        self._life()
        before, held = Traces.now(), self._life()
        own = own_bytes()
        again = self._life()
        left, grown = left_after(before, 10), own_bytes() - own
        expect(
            not left, "a life leaves no process, thread or open file", seen=", ".join(left),
            where="hardpoint.worker.Worker.shutdown: Give everything back.",
            do="Join threads and close what was opened, in Worker.shutdown.",
        )  # fmt: skip
        expect(
            again <= held, "after a shutdown the device holds what it held before",
            seen=f"{held} bytes when the second life began, {again} when the third did",
            where="hardpoint.worker.Worker.shutdown: Give everything back.",
            do="Drop every reference to weights and cache, and empty the allocator's cache.",
        )  # fmt: skip
        expect(
            grown < LARGE_CACHE // 2, "a life leaves no more memory mapped in the driver's process "
            "than the one before", seen=f"{grown} bytes more, after a cache of {LARGE_CACHE}",
            where="hardpoint.worker.Worker.shutdown: Give everything back.",
            do="Drop every reference to weights and cache; look at globals, threads and closures.",
        )  # fmt: skip

    @pytest.mark.parametrize("mask", MASKS, ids=["numbers", "uuids"])
    def test_a_mask_of_devices_is_understood(self, mask: str) -> None:
        """``3,6`` and the UUID form: two devices, in that order; the other way round, too."""
        turned = ",".join(reversed(mask.split(",")))
        seen, reverse = map(self.subject.probe.visible_devices, (mask, turned))
        if seen is None or reverse is None:
            not_applicable("its probe knows no variable for visible devices")
        expect(
            len(set(seen)) == len(seen) == 2 and reverse == seen[::-1],
            f"under the mask {mask!r} two devices are visible, in its order",
            seen=f"{seen}, and under {turned!r} {reverse}",
            where=Platform.probe, do="Split at commas; accept numbers and UUIDs; do not sort.",
        )  # fmt: skip

    def test_devices_that_a_launcher_assigned_are_taken_as_they_are(self) -> None:
        """By resource name; ids of others are left alone."""
        platform = self.subject.platform()
        prepared = self.subject.prepare()
        expect_equal(
            platform.assigned_devices({"somebody-else": ("3", "6")}), (),
            "devices of a resource that is another's are not taken",
            where=Platform.assigned_devices, do="Look only at the resource of your own name.",
        )  # fmt: skip
        names = platform.placement(prepared.config).resources_per_worker
        if not names:
            not_applicable("it names no resource by which a launcher could give it devices")
        for name in names:
            for ids in (("3", "6"), tuple(MASKS[1].split(","))):
                seen = platform.assigned_devices({name: ids})
                expect(
                    seen in ((), ids),
                    "assigned_devices are logical ids out of what a launcher assigned",
                    seen=f"{seen} of {ids} ({name})", where=Platform.assigned_devices,
                    do="Return the ids of your own resource, or nothing.",
                )  # fmt: skip

    def _life(self) -> int:
        """Start, give it a large cache where it has room, shut down; return what the device held
        when it began, over all ranks.
        """
        executor = self.subject.prepare().start()
        try:
            held = self._held(executor)
            if min(executor.determine_available_memory()) > 2 * LARGE_CACHE:
                page = max(executor.collective_rpc("get_cache_block_size_bytes"))
                executor.initialize_from_config(plans(executor, LARGE_CACHE // page))
                self._expect_counted(executor, held)
        finally:
            executor.shutdown()
        return held or 0

    def _held(self, executor: Executor) -> int | None:
        kind = type(self.subject.probe)
        held = executor.collective_rpc(in_worker.held_bytes, args=(kind,))
        return None if None in held else sum(held)

    def _expect_counted(self, executor: Executor, before: int | None) -> None:
        """A probe that counts too little would see no leak."""
        after = self._held(executor)
        weights = sum(report.weight_bytes for report in executor.load_reports)
        if before is not None and after is not None:
            expect(
                before >= weights and after - before >= LARGE_CACHE // 2,
                "held_bytes counts weights and KV cache", seen=f"{before} bytes with weights of "
                f"{weights}, and {after} with a cache of {LARGE_CACHE} beside them",
                where=Probe.held_bytes, do="Ask the device's allocator for all that is in use.",
            )  # fmt: skip
