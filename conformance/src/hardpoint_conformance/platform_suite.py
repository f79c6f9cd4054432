"""The Platform suite: what the driver is told, and whether it then comes true."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from attrs import evolve
from hardpoint.capabilities import RESERVED, SINCE, YES, Capability, Support
from hardpoint.config import Config
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.executor import Executor
from hardpoint.kv_cache import DTYPE_BYTES
from hardpoint.platform import Platform, RequestView
from hardpoint.records import ForkSafety, Limits, Placement, Problem
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.fresh_process import ask
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.kit_model import ModelShape
from hardpoint_conformance.model_runner.draws import PARAMETERS
from hardpoint_conformance.plugin_suite import HARMLESS
from hardpoint_conformance.probe import Probe
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.subject import BLOCKS, MODEL_LENGTH, plans
from hardpoint_conformance.suite import Suite, not_applicable, own_workers
from hardpoint_conformance.unchanged import as_data
from hardpoint_conformance.watching import Traces, left_after, own_bytes

RESERVED_IN = "hardpoint.capabilities.RESERVED"
LARGE_CACHE = 128 << 20
"""Bytes of a KV cache that would be missed if a shutdown left it: a process has that much by chance
only if something holds it.
"""
MASKS = ("3,6", "GPU-8a6f1c9e-0003,GPU-8a6f1c9e-0006")


class PlatformSuite(Suite):
    """Limits, placement, check, check_request, capabilities, memory, devices."""

    contract: ClassVar[str] = "platform"

    # What is declared.

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
        limits = self._limits()
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

    # What then happens.

    @own_workers
    def test_a_configuration_that_check_accepts_runs(self) -> None:
        """Empty problems, and the workers start."""
        prepared = self.subject.prepare()
        problems = tuple(prepared.platform.check(prepared.config))
        expect(
            not problems, "the kit's own small configuration is accepted",
            seen="; ".join(map(str, problems)), where=Platform.check,
            do="Refuse in check only what cannot run.",
        )  # fmt: skip
        bench = Bench(self.subject, self.subject.started(prepared))
        bench.check_greedy(bench.steps.alone((5, 9, 3), 4))
        self.subject.end(bench.executor)

    @own_workers
    def test_every_data_type_that_it_offers_runs(self) -> None:
        """And gives what the oracle gives, within the type's tolerance."""
        for dtype in self._limits().dtypes:
            self._runs(dtype=dtype)

    @own_workers
    def test_the_largest_and_the_smallest_block_size_run(self) -> None:
        """And the default. Of sizes of 64 tokens and more, the smallest is enough."""
        sizes = self._limits().block_sizes
        large = max((size for size in sizes if size < 64), default=min(sizes))
        for size in dict.fromkeys((min(sizes), sizes[0], large)):
            self._runs(block_size=size, max_model_len=min(MODEL_LENGTH, BLOCKS * size))

    @own_workers
    def test_the_largest_head_size_runs_and_so_do_tied_embeddings(self) -> None:
        """The kit's other models have the smallest, and an output matrix of their own."""
        shape = ModelShape.within(self._limits(), tied=True)
        largest = max(self._limits().head_sizes, default=2 * shape.head_size)
        self._runs(evolve(shape, head_size=largest))

    @pytest.mark.parametrize("key", ["dtype", "block_size", "max_num_seqs"])
    def test_what_is_beyond_the_limits_is_refused_before_anything_starts(self, key: str) -> None:
        """With a ConfigError that names the key."""
        limits = self._limits()
        values = {
            "dtype": next((d for d in ("float32", "bfloat16") if d not in limits.dtypes), None),
            "block_size": next(n for n in range(3, 999, 2) if n not in limits.block_sizes),
            "max_num_seqs": None if limits.max_num_seqs is None else limits.max_num_seqs + 1,
        }
        value = values[key]
        if value is None:
            not_applicable("its limits leave nothing out that could be asked for")
        error = expect_raises(
            ConfigError, lambda: self.subject.prepare(None, **{key: value}),
            "what the limits exclude is a ConfigError before any worker starts", where=Limits,
            do="Report the limits truly; the check against them is core's.",
        )  # fmt: skip
        expect(
            key in str(error), "the error names the configuration key", seen=str(error),
            where=Problem, do="Leave it to core, or name the key in your Problem.",
        )  # fmt: skip

    @own_workers
    def test_more_ranks_than_it_can_place_are_an_error_and_no_hang(self) -> None:
        """A size that fits neither the model nor the machine."""
        expect_raises(
            HardpointError,
            lambda: self.subject.prepare(None, tensor_parallel_size=7).start().shutdown(),
            "ranks that cannot be had are refused with a typed error", where=Platform.check,
            do="Return a Problem of tensor_parallel_size from check, or declare the capability "
            "NOT_YET.",
        )  # fmt: skip

    def test_what_is_declared_unsupported_is_refused_before_it_is_queued(self) -> None:
        """``unsupported_parameters``: name -> why."""
        platform = self.subject.platform()
        defaults = SamplingParams()
        for name, reason in platform.unsupported_parameters.items():
            expect(
                hasattr(defaults, name) and reason, "unsupported_parameters names sampling "
                "parameters and says why", seen=f"{name}: {reason!r}", where=Platform,
                do="Use the names of hardpoint.sampling_params.SamplingParams.",
            )  # fmt: skip
        plain = RequestView(req_id="kit", num_prompt_tokens=3, sampling=GREEDY)
        expect_equal(
            platform.check_request(plain), None, "a plain request is accepted",
            where=Platform.check_request, do="Refuse only what cannot be honoured.",
        )  # fmt: skip

    @pytest.mark.parametrize("parameter", PARAMETERS)
    def test_check_request_says_what_then_happens(self, parameter: str) -> None:
        """Accepted: it has its effect (the ModelRunner suite). Refused: with the key, unedited."""
        values: dict[str, Any] = {
            "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0,
            "logit_bias": {3: 1.0}, "allowed_token_ids": (3, 4), "min_tokens": 2,
            "stop_token_ids": (5,), "bad_word_ids": ((5,),),
        }  # fmt: skip
        sampling = evolve(GREEDY, **{parameter: values[parameter]})
        view = RequestView(req_id="kit", num_prompt_tokens=3, sampling=sampling)
        same = evolve(GREEDY, **{parameter: values[parameter]})
        problem = self.subject.platform().check_request(view)
        expect(
            view.sampling == same
            and (problem is None or (isinstance(problem, Problem) and problem.message)),
            "check_request returns a Problem or None and edits nothing", seen=problem,
            where=Platform.check_request, do="Return Problem(key=..., value=..., message=...).",
        )  # fmt: skip

    # Memory and devices.

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

    # Within.

    def _limits(self) -> Limits:
        prepared = self.subject.prepare()
        return prepared.platform.limits(prepared.config)

    def _runs(self, shape: ModelShape | None = None, **keys: object) -> None:
        bench = Bench(self.subject, self.subject.ready(shape, **keys))
        request = bench.steps.add((5, 9, 3, 77, 20))
        bench.steps.run(4)
        bench.check_greedy(request, f"with {shape or keys}")
        self.subject.end(bench.executor)

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

    @staticmethod
    def _answers(platform: Platform, config: Config) -> tuple[Any, ...]:
        placement = platform.placement(config)
        return (
            platform.limits(config), placement, tuple(platform.check(config)),
            dict(platform.environment(config, placement)), platform.fork_safe(),
        )  # fmt: skip
