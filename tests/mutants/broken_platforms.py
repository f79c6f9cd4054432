"""Platforms that are wrong in one way each: the dummy's, with one answer changed."""

from __future__ import annotations

import os
import time
from typing import ClassVar

from attrs import evolve
from hardpoint.capabilities import NEVER, NOT_YET, YES, Capability
from hardpoint.records import ForkSafety, Problem, Verdict
from hardpoint_dummy.platform import DummyPlatform
from mutation import broken

PLUGIN, RUNNER, WORKER = "PluginSuite", "ModelRunnerSuite", "WorkerSuite"
UNTOUCHED = "test_no_device_is_initialised_by_discovery_selection_and_validation"
PURE = "test_the_verdict_is_pure"
NOTHING_CHANGES = "test_what_the_driver_asks_changes_nothing"
LIMITS = "test_limits_make_sense"


def capabilities(**changes):
    """The dummy's, with some declared otherwise."""
    return {**DummyPlatform.capabilities, **{Capability[name]: v for name, v in changes.items()}}


@broken("nothing")
class TwinPlatform(DummyPlatform):
    """Unbroken."""


# The verdict.


@broken("the probe imports an array library", UNTOUCHED, suite=PLUGIN)
class HeavyProbe(DummyPlatform):
    def probe(self):
        import numpy as np

        return evolve(super().probe(), reason=f"numpy {np.__version__}")


@broken("the probe opens the device", UNTOUCHED, suite=PLUGIN)
class OpeningProbe(DummyPlatform):
    device = None

    def probe(self):
        type(self).device = os.open("/dev/pts", os.O_RDONLY)  # stands for a device file
        return super().probe()


@broken("the probe sets a variable", UNTOUCHED, suite=PLUGIN)
class VariableProbe(DummyPlatform):
    def probe(self):
        os.environ["MUTANT_FOUND"] = "1"
        return super().probe()


@broken("the probe takes 300 ms", "test_the_probe_ends_in_time", suite=PLUGIN)
class SlowProbe(DummyPlatform):
    def probe(self):
        time.sleep(0.3)
        return super().probe()


@broken("the probe says something else the second time", PURE, suite=PLUGIN)
class FickleProbe(DummyPlatform):
    asked = 0

    def probe(self):
        type(self).asked += 1
        return evolve(super().probe(), reason=f"asked {self.asked} times")


@broken(
    "the verdict gives no reason", "test_the_verdict_says_why_and_names_its_devices", suite=PLUGIN
)
class SilentVerdict(DummyPlatform):
    def probe(self):
        return Verdict(available=True, priority=-1, reason="")


@broken("two devices have one id", "test_the_verdict_says_why_and_names_its_devices", suite=PLUGIN)
class TwoOfOneId(DummyPlatform):
    def probe(self):
        verdict = super().probe()
        return evolve(verdict, devices=verdict.devices * 2)


# What is declared.


@broken("a capability is declared neither way", "test_every_capability_is_declared")
class Undeclared(DummyPlatform):
    capabilities: ClassVar = {
        k: v for k, v in DummyPlatform.capabilities.items() if k is not Capability.LORA
    }


@broken(
    "a capability is declared of which the contract has the name alone",
    "test_what_the_contract_reserves_is_not_declared",
)
class DeclaredEarly(DummyPlatform):
    capabilities = capabilities(KV_CONNECTOR=YES)


@broken(
    "a capability is declared that is not there",
    "test_a_processor_changes_the_logits_before_the_choice", suite=RUNNER,
)  # fmt: skip
class DeclaredButAbsent(DummyPlatform):
    capabilities = capabilities(LOGITS_PROCESSORS=YES)


@broken(
    "a capability that works is declared NOT_YET", "test_a_copied_block_is_the_block", suite=RUNNER
)
class WorksAlready(DummyPlatform):
    capabilities = capabilities(BLOCK_COPIES=NOT_YET)


@broken(
    "what is declared impossible is served",
    "test_a_prefix_in_the_cache_is_used_as_it_is",
    suite=RUNNER,
)
class NeverAndYetServed(DummyPlatform):
    capabilities = capabilities(PREFIX_CACHING=NEVER)


# Limits and placement.


def limited(**changes):
    """A platform with other limits."""

    class Limited(DummyPlatform):
        def limits(self, config):
            return evolve(super().limits(config), **changes)

    return Limited


@broken("the default type is not among those offered", LIMITS)
class DefaultNotOffered(limited(dtypes=("bfloat16",))):
    pass


@broken("no block size is offered", LIMITS)
class NoBlockSize(limited(block_sizes=())):
    pass


@broken("the default of max_num_seqs is above its bound", LIMITS)
class DefaultAboveBound(limited(max_num_seqs=2)):
    pass


@broken("a type is offered that cannot be computed", "test_every_data_type_that_it_offers_runs")
class TypeThatFails(limited(dtypes=("float32", "float16"))):
    pass


@broken("limits need values that may be unset", "test_limits_can_be_asked_before_anything_is_known")
class LimitsNeedValues(DummyPlatform):
    def limits(self, config):
        if config.description is None and config.model.model is None and config.platform is None:
            raise ValueError("there is no model to look at")
        return super().limits(config)


@broken("the output rank is not a rank", "test_placement_makes_sense")
class OutputRankBeyond(DummyPlatform):
    def placement(self, config):
        return evolve(super().placement(config), output_rank=5)


@broken("check writes into the configuration", NOTHING_CHANGES)
class CheckMutates(DummyPlatform):
    def check(self, config):
        object.__setattr__(config.cache, "block_size", 8)
        return super().check(config)


@broken("limits change from one question to the next", NOTHING_CHANGES)
class FickleLimits(DummyPlatform):
    asked = 0

    def limits(self, config):
        type(self).asked += 1
        return evolve(super().limits(config), default_max_num_seqs=4 + self.asked % 2)


@broken(
    "check raises where it should return a problem", "test_a_configuration_that_check_accepts_runs"
)
class CheckRaises(DummyPlatform):
    def check(self, config):
        raise KeyError("description")


@broken("check refuses what runs", "test_a_configuration_that_check_accepts_runs")
class CheckRefuses(DummyPlatform):
    def check(self, config):
        return (Problem(key="max_num_seqs", value=4, message="must be 64."),)


@broken("check accepts what then does not run", "test_the_largest_and_the_smallest_block_size_run")
class BlockSizeThatFails(DummyPlatform):
    worker_class = "broken_workers:NoSmallBlocks"


LARGEST = "test_the_largest_head_size_runs_and_so_do_tied_embeddings"


@broken("a head size that it offers does not run", LARGEST)
class HeadSizeThatFails(DummyPlatform):
    worker_class = "broken_workers:NoLargeHeads"

    def limits(self, config):
        return evolve(super().limits(config), head_sizes=(128, 64))


@broken("models that use the embeddings twice do not load", LARGEST)
class TiedFails(DummyPlatform):
    worker_class = "broken_workers:NoTiedEmbeddings"


@broken("an environment value is a number", "test_the_small_answers_are_of_their_kind")
class NumberInEnvironment(DummyPlatform):
    def environment(self, config, placement):
        return {"MUTANT_UNITS": 1}


@broken("fork_safe gives no reason", "test_the_small_answers_are_of_their_kind")
class UnexplainedForkSafety(DummyPlatform):
    def fork_safe(self):
        return ForkSafety(safe=True, reason="")


@broken(
    "a launcher's ids are renumbered", "test_devices_that_a_launcher_assigned_are_taken_as_they_are"
)
class RenumberedDevices(DummyPlatform):
    def placement(self, config):
        return evolve(super().placement(config), resources_per_worker={"MUTANT": 1.0})

    def assigned_devices(self, resources):
        return tuple(str(i) for i, _ in enumerate(resources.get("MUTANT", ())))


MASKS = "test_a_mask_of_devices_is_understood"
ASSIGNED = "test_devices_that_a_launcher_assigned_are_taken_as_they_are"


@broken("a mask by UUID is not understood", f"{MASKS}[uuids]")
class MaskOfNumbersOnly(DummyPlatform):
    def visible_devices(self, mask):
        numbers = [part for part in mask.split(",") if part.isdigit()]
        return super().visible_devices(",".join(numbers))


@broken("devices of a mask are used in rising order", f"{MASKS}[numbers]", f"{MASKS}[uuids]")
class MaskSorted(DummyPlatform):
    def visible_devices(self, mask):
        return tuple(sorted(super().visible_devices(mask), key=lambda device: device.id))


@broken("devices of any resource are taken", ASSIGNED)
class TakesOthersDevices(DummyPlatform):
    def assigned_devices(self, resources):
        return tuple(each for ids in resources.values() for each in ids)


@broken("assigned devices are counted from 0", ASSIGNED)
class CountsAssignedDevices(DummyPlatform):
    def assigned_devices(self, resources):
        return tuple(str(n) for n in range(len(resources.get("dummy", ()))))


@broken(
    "a method of the platform is misspelt", "test_the_classes_that_it_names_are_there_and_whole"
)
class MisspeltCheck(DummyPlatform):
    def check_requests(self, request):
        return None


@broken("a class that it names is not there", "test_the_classes_that_it_names_are_there_and_whole")
class NoSuchWorker(DummyPlatform):
    worker_class = "hardpoint_dummy.worker:NoSuchWorker"


@broken("its worker lacks an abstract method", "test_the_classes_that_it_names_are_there_and_whole")
class WorkerUnfinished(DummyPlatform):
    worker_class = "broken_workers:Unfinished"


# Requests.


@broken("check_request edits the request", "test_check_request_says_what_then_happens[logit_bias]")
class RequestEdited(DummyPlatform):
    def check_request(self, request):
        object.__setattr__(request.sampling, "logit_bias", None)
        return super().check_request(request)


@broken("check_request raises", "test_check_request_says_what_then_happens[min_tokens]")
class RequestRaises(DummyPlatform):
    def check_request(self, request):
        if request.sampling.min_tokens:
            raise NotImplementedError("min_tokens")
        return super().check_request(request)


@broken(
    "check_request refuses without a key", "test_check_request_says_what_then_happens[logit_bias]"
)
class RefusalWithoutKey(DummyPlatform):
    def check_request(self, request):
        if request.sampling.logit_bias:
            return Problem(key="", value=None, message="this cannot be served.")
        return super().check_request(request)


@broken(
    "check_request refuses a plain request",
    "test_what_is_declared_unsupported_is_refused_before_it_is_queued",
)
class PlainRefused(DummyPlatform):
    def check_request(self, request):
        if request.sampling.greedy:
            return Problem(key="temperature", value=0, message="this device only draws.")
        return None


@broken(
    "a parameter is accepted and ignored",
    "test_a_parameter_changes_the_choice_as_the_rules_say[bad_word_ids]", suite=RUNNER,
)  # fmt: skip
class BadWordsIgnored(DummyPlatform):
    def check_request(self, request):
        return None
