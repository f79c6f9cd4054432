"""What a platform declares and answers before anything starts."""

from __future__ import annotations

from typing import Any

from hardpoint.capabilities import RESERVED, SINCE, YES, Capability, Support
from hardpoint.config import Config
from hardpoint.kv_cache import DTYPE_BYTES
from hardpoint.platform import Platform
from hardpoint.records import ForkSafety, Limits, Placement

from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.fresh_process import ask
from hardpoint_conformance.platform.part import PlatformPart
from hardpoint_conformance.plugin_suite import HARMLESS
from hardpoint_conformance.unchanged import as_data

RESERVED_IN = "hardpoint.capabilities.RESERVED"


class DeclarationTests(PlatformPart):
    """Capabilities, limits, placement, the small answers, the classes that it names."""

    def test_every_capability_is_declared(self) -> None:
        """YES, NOT_YET or NEVER, for each that the plugin's contract number has."""
        declared = self.subject.platform().capabilities
        missing = [
            each.name
            for each in Capability
            if SINCE[each] <= self.subject.api and not isinstance(declared.get(each), Support)
        ]
        expect(
            not missing, "a platform answers for every capability of its contract number",
            seen=f"undeclared: {', '.join(missing)}", where=Platform,
            do="Add each to Platform.capabilities as YES, NOT_YET or NEVER.",
        )  # fmt: skip

    def test_what_the_contract_reserves_is_not_declared(self) -> None:
        """A capability that no message or hook of the plugin's contract number asks for."""
        declared = self.subject.platform().capabilities
        early = [each.name for each in RESERVED if declared.get(each) is YES]
        expect(
            not early, "a capability whose name is only reserved is not declared YES",
            seen=f"YES for {', '.join(sorted(early))}", where=RESERVED_IN,
            do="Declare NOT_YET; say in your own documentation what you offer by records of yours.",
        )  # fmt: skip

    def test_limits_make_sense(self) -> None:
        """Defaults are among what is offered, sizes are positive."""
        limits = self.limits()
        sizes = (*limits.block_sizes, *limits.head_sizes, limits.chunk_multiple,
                 limits.reserved_blocks, limits.default_max_num_seqs,
                 limits.default_max_num_batched_tokens)  # fmt: skip
        wrong = [
            what
            for what, good in {
                "default_dtype is not among dtypes": limits.default_dtype in limits.dtypes,
                "a dtype is unknown": set(limits.dtypes) <= set(DTYPE_BYTES),
                "no block size is offered": bool(limits.block_sizes),
                "a size is below 1": all(type(size) is int and size >= 1 for size in sizes),
                "default_max_num_seqs is above max_num_seqs": limits.max_num_seqs is None
                or limits.default_max_num_seqs <= limits.max_num_seqs,
                "default_max_num_batched_tokens is above its bound": (
                    limits.max_num_batched_tokens is None
                    or limits.default_max_num_batched_tokens <= limits.max_num_batched_tokens
                ),
                "max_prefills_per_step is below 1": limits.max_prefills_per_step is None
                or limits.max_prefills_per_step >= 1,
            }.items()
            if not good
        ]
        expect(
            not wrong, "limits are sizes that can be had, their defaults among them",
            seen=f"{'; '.join(wrong)}: {limits}", where=Limits, do="Mend Platform.limits.",
        )  # fmt: skip

    def test_placement_makes_sense(self) -> None:
        """At least one worker; the output rank is one of them."""
        placement = self.subject.prepare().platform.placement(self.subject.prepare().config)
        expect(
            isinstance(placement, Placement) and placement.num_workers >= 1
            and 0 <= placement.output_rank < placement.num_workers
            and placement.devices_per_worker >= 1 and placement.num_hosts >= 1,
            "placement names at least one worker and an output rank among them", seen=placement,
            where=Platform.placement, do="One worker for each rank is the general rule.",
        )  # fmt: skip

    def test_what_the_driver_asks_changes_nothing(self) -> None:
        """limits, placement, check, environment, context: values out, nothing in."""
        prepared = self.subject.prepare()
        platform, config = prepared.platform, prepared.config
        before = as_data(config)
        first = self._answers(platform, config)
        second = self._answers(platform, config)
        expect_equal(
            as_data(config), before, "a platform never changes the configuration that it is given",
            where=Platform, do="Return what shall be changed from the hook hardpoint_configure.",
        )  # fmt: skip
        expect_equal(
            second, first, "a platform asked twice answers the same", where=Platform,
            do="Compute answers from the configuration; keep no state.",
        )  # fmt: skip

    def test_limits_can_be_asked_before_anything_is_known(self) -> None:
        """``config`` may still have unset values."""
        limits = self.subject.platform().limits(Config())
        expect(
            isinstance(limits, Limits), "limits are answered for a configuration without values",
            seen=limits, where=Platform.limits, do="Treat None as unknown.",
        )  # fmt: skip

    def test_the_small_answers_are_of_their_kind(self) -> None:
        """environment, fork_safe, silent_after, preload, assigned_devices."""
        prepared = self.subject.prepare()
        platform, config = prepared.platform, prepared.config
        environment = platform.environment(config, platform.placement(config))
        texts = all(isinstance(each, str) for pair in environment.items() for each in pair)
        safety = platform.fork_safe()
        expect(
            texts and isinstance(safety, ForkSafety) and safety.reason
            and platform.silent_after > 0 and isinstance(platform.preload, tuple)
            and platform.assigned_devices({}) == (),
            "environment maps names to texts, fork_safe has a reason, silent_after is positive, "
            "preload is a tuple, and without resources no device is assigned",
            seen=f"environment {dict(environment)}, {safety}, silent_after "
            f"{platform.silent_after}, preload {platform.preload}",
            where=Platform, do="See the docstring of each.",
        )  # fmt: skip

    def test_preloading_initialises_no_device(self) -> None:
        """A nursery imports it and forks."""
        answer = ask("preloaded", self.subject.name, self.subject.settings)
        devices = [path for path in answer["devices"] if not HARMLESS.match(path)]
        expect(
            not devices and not answer["initialised"],
            "modules in preload initialise no device when they are imported", seen=devices,
            where=Platform, do="Leave what touches the device out of module level code.",
        )  # fmt: skip

    def test_the_classes_that_it_names_are_there_and_whole(self) -> None:
        """Worker and ModelRunner, without an abstract method left."""
        for key, found in ask("resolved_classes", self.subject.name, self.subject.settings).items():
            expect(
                not found["abstract"], f"{key} implements every abstract method",
                seen=f"{found['name']} lacks {', '.join(found['abstract'])}", where=Platform,
                do="Implement them; those that the platform cannot do are optional ones.",
            )  # fmt: skip
            expect(
                not found["misspelt"], f"a method of {key} that is named nearly like one of the "
                "contract overrides it", seen=", ".join(found["misspelt"]), where=Platform,
                do="Correct the name, or choose one that cannot be taken for it.",
            )  # fmt: skip

    @staticmethod
    def _answers(platform: Platform, config: Config) -> tuple[Any, ...]:
        placement = platform.placement(config)
        return (
            platform.limits(config), placement, tuple(platform.check(config)),
            dict(platform.environment(config, placement)), platform.fork_safe(),
        )  # fmt: skip
