"""Workers that are wrong in one way each: the dummy's, with one method changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from attrs import evolve
from hardpoint.errors import ConfigError
from hardpoint.records import SleepReport
from hardpoint.worker import Worker
from hardpoint_dummy.worker import DummyWorker
from mutation import broken

PLATFORM, RUNNER = "PlatformSuite", "ModelRunnerSuite"
BASELINE = "test_memory_is_back_to_the_baseline_after_every_life"
SLEEP = "test_sleep_frees_and_waking_brings_all_back"
SHUTDOWN = "test_a_worker_can_be_shut_down_at_every_stage_and_twice"
REPORTS = "test_reports_of_the_start_make_sense"
SPECS = "test_the_kv_cache_specs_describe_the_model"

LEAKED = []


class Unfinished(Worker):
    """Not a mutant by itself: a worker without its methods, for a platform to name."""


class NoSmallBlocks(DummyWorker):
    """Not a mutant by itself: cannot execute the smallest of the offered block sizes."""

    def initialize_from_config(self, kv_cache_config):
        if kv_cache_config.block_size < 4:
            raise ConfigError("blocks of fewer than 4 tokens")
        super().initialize_from_config(kv_cache_config)


class NoLargeHeads(DummyWorker):
    """Not a mutant by itself: cannot load heads of more than 64 numbers."""

    def load_model(self):
        if self.config.description.head_size > 64:
            raise ConfigError("heads of more than 64 numbers")
        return super().load_model()


class NoTiedEmbeddings(DummyWorker):
    """Not a mutant by itself: looks for an output matrix in every checkpoint."""

    def load_model(self):
        if self.config.description.hf_config["tie_word_embeddings"]:
            raise ConfigError("lm_head.weight is missing")
        return super().load_model()


@broken("nothing")
class TwinWorker(DummyWorker):
    """Unbroken."""


# Life.


@broken("shutdown needs a model", SHUTDOWN)
class ShutdownNeedsAModel(DummyWorker):
    def shutdown(self):
        self.get_model_runner().get_model()
        super().shutdown()


@broken("shutdown leaves a thread", BASELINE, suite=PLATFORM)
class LeakedThread(DummyWorker):
    def shutdown(self):
        super().shutdown()
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


@broken("a child process outlives its worker", BASELINE, suite=PLATFORM)
class LeakedChild(DummyWorker):
    def init_device(self):
        super().init_device()
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        LEAKED.append(subprocess.Popen(command))


@broken("shutdown leaves an open file", BASELINE, suite=PLATFORM)
class LeakedFile(DummyWorker):
    def init_device(self):
        super().init_device()
        LEAKED.append(os.open("/dev/null", os.O_RDONLY))


@broken("device memory of a worker that ended is still held", BASELINE, suite=PLATFORM)
class LeakedMemory(DummyWorker):
    held = 0

    def shutdown(self):
        type(self).held += 1 << 20
        super().shutdown()

    def init_device(self):
        super().init_device()
        self.memory.allocate("leaked", self.held)


@broken(
    "a second worker in the process finds the device taken",
    "test_after_an_end_a_new_worker_serves_in_the_same_process",
)
class DeviceTakenForever(DummyWorker):
    taken = False

    def init_device(self):
        if type(self).taken:
            raise ConfigError("the device is in use")
        type(self).taken = True
        super().init_device()


# Reports.


@broken("the weights are reported as no bytes", REPORTS)
class WeightlessReport(DummyWorker):
    def load_model(self):
        return evolve(super().load_model(), weight_bytes=0)


@broken("a worker does not say that it generates", REPORTS)
class NoTasks(DummyWorker):
    def supported_tasks(self):
        return ()


@broken("specs ignore the configured block size", SPECS)
class OtherBlockSize(DummyWorker):
    def get_kv_cache_spec(self):
        specs = super().get_kv_cache_spec()
        return {k: evolve(v, block_size=v.block_size * 2) for k, v in specs.items()}


@broken("a block's bytes are those of one layer", SPECS)
class OneLayersBytes(DummyWorker):
    def get_cache_block_size_bytes(self):
        return next(iter(self.get_kv_cache_spec().values())).page_bytes


@broken("free memory is told in MiB", "test_the_memory_that_is_reported_can_be_had")
class MemoryInMiB(DummyWorker):
    def determine_available_memory(self):
        return super().determine_available_memory() >> 20


@broken(
    "a cache that does not fit is a MemoryError",
    "test_a_cache_that_cannot_fit_is_a_memory_budget_error",
)
class AnotherMemoryError(DummyWorker):
    def initialize_from_config(self, kv_cache_config):
        if sum(tensor.num_bytes for tensor in kv_cache_config.tensors) > self.memory.free:
            raise MemoryError("device out of memory")
        super().initialize_from_config(kv_cache_config)


@broken(
    "a cache that does not fit is accepted", "test_a_cache_that_cannot_fit_is_a_memory_budget_error"
)
class OvercommittedCache(DummyWorker):
    def initialize_from_config(self, kv_cache_config):
        self.memory.total = 1 << 62
        super().initialize_from_config(kv_cache_config)


# Sleep and weights.


@broken("sleep frees nothing, and says so", f"{SLEEP}[1]", f"{SLEEP}[2]")
class SleepFreesNothing(DummyWorker):
    def sleep(self, level):
        return SleepReport(bytes_freed=0, bytes_backed_up=0)


@broken("sleep frees nothing, and says otherwise", f"{SLEEP}[1]", f"{SLEEP}[2]")
class SleepPretends(DummyWorker):
    def sleep(self, level):
        report = super().sleep(level)
        self.memory.restore(("weights", "kv_cache"))
        return report


@broken("waking loses a buffer", f"{SLEEP}[1]")
class WakeLosesABuffer(DummyWorker):
    def wake_up(self, tags):
        report = super().wake_up(tags)
        if "weights" in tags:
            self.get_model_runner().get_model().weights ^= 1
        return report


@broken("the cache cannot be woken alone", "test_sleep_follows_its_state_machine")
class WakeRaises(DummyWorker):
    def wake_up(self, tags):
        if tuple(tags) == ("kv_cache",):
            raise ValueError("weights first")
        return super().wake_up(tags)


@broken("discarding the cache drops the weights, too", "test_a_part_sleeps_alone")
class DiscardTakesAll(DummyWorker):
    def discard(self, tags):
        self.get_model_runner().get_model().weights ^= 1
        return super().discard(tags)


@broken("reload_weights ignores its path", "test_weights_are_reloaded_in_place")
class ReloadIgnoresPath(DummyWorker):
    def reload_weights(self, path=None):
        return super().reload_weights(None)


@broken("profiling changes the answer", "test_profiling_changes_nothing")
class ProfilingDisturbs(DummyWorker):
    def profile(self, is_start, prefix=None, delay_iterations=0, max_iterations=None):
        super().profile(is_start, prefix, delay_iterations, max_iterations)
        self.get_model_runner().get_model().weights ^= is_start


@broken(
    "a declared service is the base class's",
    "test_what_is_not_declared_is_refused_and_what_is_declared_is_there[SHARDED_STATE]",
)
class NoSharding(DummyWorker):
    save_sharded_state = Worker.save_sharded_state


# Services that the runner's suite asks for.


@broken(
    "a plan reaches the runner without the records of other plugins",
    "test_records_of_others_pass_through",
    suite=RUNNER,
)
class RecordsDropped(DummyWorker):
    def execute_model(self, scheduler_output):
        mine = {k: v for k, v in scheduler_output.extra.items() if k == "dummy"}
        return super().execute_model(evolve(scheduler_output, extra=mine))


@broken(
    "a request reaches the runner without the records of other plugins",
    "test_records_of_others_pass_through",
    suite=RUNNER,
)
class RequestRecordsDropped(DummyWorker):
    def execute_model(self, scheduler_output):
        new = tuple(evolve(each, extra={}) for each in scheduler_output.new)
        return super().execute_model(evolve(scheduler_output, new=new))


@broken("an inert batch writes into the cache", "test_an_inert_batch_touches_nothing", suite=RUNNER)
class InertBatchWrites(DummyWorker):
    def execute_dummy_batch(self):
        cache = self.get_model_runner().cache
        for block in range(1, cache.num_blocks):
            cache.write([[block]], 0, 1)


@broken(
    "saved shards are of other weights", "test_saved_shards_load_as_the_same_model", suite=RUNNER
)
class ShardsOfOthers(DummyWorker):
    def save_sharded_state(self, path, pattern, max_size):
        files = super().save_sharded_state(path, pattern, max_size)
        return [evolve(each, sha256="0" * 64) for each in files]


@broken(
    "an unknown adapter is removed with success",
    "test_an_adapter_is_of_the_requests_that_name_it",
    suite=RUNNER,
)
class RemovesTheUnknown(DummyWorker):
    def remove_lora(self, lora_id):
        super().remove_lora(lora_id)
        return True
