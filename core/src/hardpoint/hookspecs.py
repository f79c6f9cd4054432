"""Every hook, in the order in which they fire. Hooks register and announce; classes do the work.

A hook returns records or values and changes nothing that it is given. Implementations may take
fewer arguments than the specification; a misspelt hook fails at registration. Offers are collected
once; announcements cost nothing when nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.executor import Executor
    from hardpoint.messages import ModelRunnerOutput, SchedulerOutput
    from hardpoint.platform import Platform
    from hardpoint.records import (
        Change,
        ExecutorRecord,
        ExtensionRecord,
        Offer,
        Operation,
        PlatformRecord,
    )
    from hardpoint.worker import Worker

PROJECT = "hardpoint"
hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a function below as a hook specification."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a ``plugin.py`` as an implementation of the hook of the same name."""


# Offers of identity: asked of one plugin at a time, right after its light module was imported.


@hookspec(firstresult=True)
def hardpoint_platform() -> PlatformRecord | None:
    """Offer a platform.

    Called in the driver and in every worker, on plugins of ``hardpoint.platforms``, once loaded.

    Example::

        @hookimpl
        def hardpoint_platform():
            return PlatformRecord(name="acme", api=(2, 0), platform="acme.platform:AcmePlatform")
    """


@hookspec(firstresult=True)
def hardpoint_executor() -> ExecutorRecord | None:
    """Offer an executor.

    Called by discovery in the driver, once after loading, on plugins of ``hardpoint.executors``.

    Example::

        @hookimpl
        def hardpoint_executor():
            return ExecutorRecord(name="threads", api=(2, 0), executor="acme.threads:Threads")
    """


@hookspec(firstresult=True)
def hardpoint_extension() -> ExtensionRecord | None:
    """Offer an extension's identity.

    Called in the driver and in every worker, on plugins of ``hardpoint.extensions``, once loaded.

    Example::

        @hookimpl
        def hardpoint_extension():
            return ExtensionRecord(name="tracer", api=(2, 0), settings="acme.tracer:Settings")
    """


# Before workers start, in the driver.


@hookspec
def hardpoint_configure(config: Config) -> Sequence[Change]:
    """Return explained changes of the configuration.

    Called in the driver after the model's description was read (``config.description``) and before
    defaults are filled, so that unset values are visible as None. Only the selected platform and
    enabled extensions are asked. A value that the user set is protected: changing it is an error
    that names the plugin.

    Example::

        @hookimpl
        def hardpoint_configure(config):
            if config.cache.block_size is None:
                return [Change(key="block_size", old=None, new=32, reason="the unit works on 32")]
            return []
    """
    return ()


@hookspec(firstresult=True)
def hardpoint_worker(config: Config, platform: Platform) -> str | None:
    """Return the reference of the Worker class to use, or None for the platform's own.

    Called in the driver, on the selected platform's plugin; another extension's answer counts only
    if the configuration names that extension (``worker = "NAME"``).

    Example::

        @hookimpl
        def hardpoint_worker(config, platform):
            return "acme.worker:AcmeWorker"
    """


@hookspec(firstresult=True)
def hardpoint_model_runner(config: Config, platform: Platform) -> str | None:
    """Return the reference of the ModelRunner class to use, or None for the platform's own.

    Called in the driver; the rule of ``hardpoint_worker`` with the key ``model_runner``.

    Example::

        @hookimpl
        def hardpoint_model_runner(config, platform):
            return "acme.runner:AcmeModelRunner"
    """


@hookspec
def hardpoint_worker_env(config: Config, rank: int) -> Mapping[str, str]:
    """Return environment variables for the worker of ``rank``.

    Called in the driver before that worker starts, on the selected platform and enabled extensions.
    Executors that run it in the driver's process refuse what differs from the environment.

    Example::

        @hookimpl
        def hardpoint_worker_env(config, rank):
            return {"ACME_VISIBLE_UNITS": str(rank)}
    """
    return {}


# Offers of parts, collected where they are used.


@hookspec
def hardpoint_scheduling() -> Sequence[Offer]:
    """Offer admission policies (``hardpoint_engine.AdmissionPolicy``). Called in the driver.

    Example::

        @hookimpl
        def hardpoint_scheduling():
            return [Offer(name="fair", reference="acme.fair:FairAdmission")]
    """
    return ()


@hookspec
def hardpoint_operations() -> Sequence[Operation]:
    """Offer implementations of named operations. Called in workers, once at load.

    Example::

        @hookimpl
        def hardpoint_operations():
            return [Operation(name="rms_norm", platform="acme", reference="acme.ops:rms_norm")]
    """
    return ()


@hookspec
def hardpoint_quantizations() -> Sequence[Offer]:
    """Offer what packs weights, for the key ``quantization``. Called in the driver and in workers.

    Example::

        @hookimpl
        def hardpoint_quantizations():
            return [Offer(name="acme4", reference="acme.quantization:Acme4")]
    """
    return ()


@hookspec
def hardpoint_models() -> Sequence[Offer]:
    """Offer model classes by architecture name. Called in workers, once at load.

    Example::

        @hookimpl
        def hardpoint_models():
            return [Offer(name="AcmeForCausalLM", reference="acme.model:AcmeForCausalLM")]
    """
    return ()


@hookspec
def hardpoint_batch_columns() -> Sequence[Offer]:
    """Offer per-request columns (dtype, shape, default, pad value). Called in workers.

    Example::

        @hookimpl
        def hardpoint_batch_columns():
            return [Offer(name="acme_mode", reference="acme.columns:MODE")]
    """
    return ()


@hookspec
def hardpoint_graph_policies() -> Sequence[Offer]:
    """Offer policies of graphs, for the key ``graph_policy``. Called in the driver and in workers.

    Example::

        @hookimpl
        def hardpoint_graph_policies():
            return [Offer(name="threes", reference="acme.graphs:MultiplesOfThree")]
    """
    return ()


@hookspec
def hardpoint_logits_processors() -> Sequence[Offer]:
    """Offer logits processors. Called in workers, and in the driver to check requests.

    Example::

        @hookimpl
        def hardpoint_logits_processors():
            return [Offer(name="no13", reference="acme.processors:NoThirteen")]
    """
    return ()


@hookspec
def hardpoint_drafters() -> Sequence[Offer]:
    """Offer draft proposers for speculative decoding. Called in workers.

    Example::

        @hookimpl
        def hardpoint_drafters():
            return [Offer(name="suffix", reference="acme.drafting:SuffixDrafter")]
    """
    return ()


@hookspec
def hardpoint_kv_connectors() -> Sequence[Offer]:
    """Offer KV cache connectors. Called in the driver and in workers.

    Example::

        @hookimpl
        def hardpoint_kv_connectors():
            return [Offer(name="files", reference="acme.connectors:FileConnector")]
    """
    return ()


@hookspec
def hardpoint_ec_connectors() -> Sequence[Offer]:
    """Offer encoder-cache connectors. Called in the driver and in workers.

    Example::

        @hookimpl
        def hardpoint_ec_connectors():
            return [Offer(name="files", reference="acme.connectors:FileEncoderConnector")]
    """
    return ()


@hookspec
def hardpoint_weight_loaders() -> Sequence[Offer]:
    """Offer weight loaders by format name; see :mod:`hardpoint.checkpoints`. Called in workers.

    Example::

        @hookimpl
        def hardpoint_weight_loaders():
            return [Offer(name="acme-archive", reference="acme.loading:ArchiveLoader")]
    """
    return ()


@hookspec
def hardpoint_weight_transfers() -> Sequence[Offer]:
    """Offer ways to receive new weights while running. Called in workers.

    Example::

        @hookimpl
        def hardpoint_weight_transfers():
            return [Offer(name="broadcast", reference="acme.transfer:Broadcast")]
    """
    return ()


@hookspec
def hardpoint_worker_methods() -> Mapping[str, Callable[..., object]]:
    """Offer names for ``collective_rpc``: name -> function(worker, ...).

    Called in workers, once when the worker was built; the names belong to that worker instance, no
    class is changed. A name that the worker has already, or that two plugins offer, is an error.

    Example::

        @hookimpl
        def hardpoint_worker_methods():
            return {"count_params": count_params}
    """
    return {}


# Announcements.


@hookspec
def hardpoint_worker_started(worker: Worker) -> None:
    """Hear that a worker has its device. Called in the worker, after ``init_device``.

    Example::

        @hookimpl
        def hardpoint_worker_started(worker):
            log.info("rank %d is up", worker.rank)
    """


@hookspec
def hardpoint_model_loaded(worker: Worker) -> None:
    """Hear that the weights are in place. Called in the worker, after ``load_model``.

    Example::

        @hookimpl
        def hardpoint_model_loaded(worker):
            log.info("rank %d has its weights", worker.rank)
    """


@hookspec
def hardpoint_step_started(scheduler_output: SchedulerOutput, rank: int | None) -> None:
    """Hear that a step begins. Called in each worker, and in the driver with rank None.

    Example::

        @hookimpl
        def hardpoint_step_started(scheduler_output, rank):
            spans[scheduler_output.step_id] = time.monotonic()
    """


@hookspec
def hardpoint_step_finished(
    scheduler_output: SchedulerOutput, output: ModelRunnerOutput | None, rank: int | None
) -> None:
    """Hear that a step ended. Called in each worker, and in the driver with rank None; ``output``
    is None where this rank has none, or the step failed.

    Example::

        @hookimpl
        def hardpoint_step_finished(scheduler_output, rank):
            spans.pop(scheduler_output.step_id)
    """


@hookspec
def hardpoint_executor_failed(executor: Executor, error: BaseException) -> None:
    """Hear that an executor failed for good. Called in the driver, once for each executor.

    Example::

        @hookimpl
        def hardpoint_executor_failed(executor, error):
            pager.send(str(error))
    """


@hookspec
def hardpoint_worker_closing(worker: Worker) -> None:
    """Hear that a worker is about to give all back. Called in the worker, before ``shutdown``.

    Example::

        @hookimpl
        def hardpoint_worker_closing(worker):
            log.info("rank %d goes", worker.rank)
    """
