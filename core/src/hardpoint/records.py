"""Records: what plugins return from hooks, and what the parts of core hand to each other.

All are frozen values made of plain data, so that they can be logged, compared and sent to workers
as they are.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.stages import StageCarrier

Version = tuple[int, int]
"""A contract number, (major, minor)."""

AnyPlatform = "any"
"""The platform name of an offer that is good for all."""


@frozen(kw_only=True)
class Device:
    """One device as the probe saw it. ``memory_bytes`` is None where the probe cannot know without
    initialising.
    """

    id: str
    name: str
    memory_bytes: int | None = None


@frozen(kw_only=True)
class Verdict:
    """A probe's answer: usable here and now, or not, and why.

    ``available`` means usable, not "compiled in". ``priority`` orders available platforms when none
    is named (cpu: 0, accelerators: 100; the higher wins; a tie is an error); one with a negative
    priority is usable, but only by name. ``reason`` is one sentence for a person, in both cases.
    """

    available: bool
    reason: str
    priority: int = 0
    devices: tuple[Device, ...] = ()


@frozen(kw_only=True)
class PlatformRecord:
    """What ``hardpoint_platform`` returns.

    ``name`` equals the entry point's name. ``api`` is the contract number that the plugin was built
    for. ``platform`` is a reference ``"module:Class"`` to a :class:`hardpoint.platform.Platform`
    whose module imports no device library. ``settings`` is a reference to a frozen attrs class that
    declares the keys ``plugins.NAME.*``. ``messages`` are references to the attrs classes and
    enumerations of its own that its workers take or return; they travel under ``rpc.pickle =
    "never"`` too. Driver and worker import their modules.
    """

    name: str
    api: Version
    platform: str
    settings: str | None = None
    summary: str = ""
    messages: tuple[str, ...] = ()


@frozen(kw_only=True)
class ExecutorRecord:
    """What ``hardpoint_executor`` returns: as :class:`PlatformRecord`, for an
    :class:`hardpoint.executor.Executor`.

    ``probe`` is a light function giving a :class:`Verdict` (its optional dependency is installed,
    say); None means always available.
    """

    name: str
    api: Version
    executor: str
    probe: Callable[[], Verdict] | None = None
    settings: str | None = None
    summary: str = ""


@frozen(kw_only=True)
class ExtensionRecord:
    """What ``hardpoint_extension`` returns, for plugins of the group ``hardpoint.extensions``:
    identity, settings, and ``messages`` as of :class:`PlatformRecord`.
    """

    name: str
    api: Version
    settings: str | None = None
    summary: str = ""
    messages: tuple[str, ...] = ()


@frozen(kw_only=True)
class Offer:
    """A named thing that a plugin offers: its class or function by reference, for one platform or
    ``any``.

    The selected platform's own offer wins, then ``any``, then the built-in one; a tie is an error
    naming both.
    """

    name: str
    reference: str
    platform: str = AnyPlatform


@frozen(kw_only=True)
class Operation(Offer):
    """An implementation of a named operation (``attention``, ``rms_norm`` ...), resolved once at
    load.

    ``supports(description)`` gets the operation's plain-data description (dtype, head size, ...)
    and returns None if it can serve it, else the reason why not.
    """

    supports: Callable[[Mapping[str, object]], str | None] | None = None


@frozen(kw_only=True)
class Change:
    """One explained change of the configuration, returned by ``hardpoint_configure``; ``key`` is
    the key's path.
    """

    key: str
    old: object
    new: object
    reason: str


@frozen(kw_only=True)
class Problem:
    """Something that cannot be honoured: the key's path, its value, what is wrong, the way out.

    ``origin`` says who set the value; the configuration fills it in where a platform leaves it out.
    """

    key: str
    value: object
    message: str
    way_out: str = ""
    origin: str = ""

    def __str__(self) -> str:
        source = f" ({self.origin})" if self.origin else ""
        end = f" {self.way_out}" if self.way_out else ""
        return f"{self.key} = {shown(self.value)}{source}: {self.message}{end}"


def shown(value: object) -> str:
    """Return ``value`` as messages show it; no hostile value makes that long, deep or an error."""
    form = reprlib.Repr()
    form.maxstring = form.maxother = form.maxlong = 160
    try:
        return form.repr(value)
    except Exception:  # noqa: BLE001 - a number of too many digits, for one
        return f"<{type(value).__name__}>"


@frozen(kw_only=True)
class Placement:
    """How many workers there are and what each needs. *World size means workers*: one may own
    several devices.

    ``resources_per_worker`` are named amounts for launchers that place by resource (``{"CPU":
    2}``). ``output_rank`` sends the step's result. ``default_executor`` is the platform's wish,
    None for the general rule.
    """

    num_workers: int = 1
    devices_per_worker: int = 1
    resources_per_worker: Mapping[str, float] = field(factory=dict)
    output_rank: int = 0
    num_hosts: int = 1
    default_executor: str | None = None


@frozen(kw_only=True)
class Limits:
    """What a platform can execute; the scheduler obeys it and ``Platform.check`` is judged by it.

    Sizes are in tokens. ``kv_cache_dtypes``: of cached keys and values, beside ``dtypes``.
    ``head_sizes`` empty means any. ``block_sizes`` are those offered, the first is the default.
    ``mixed_batches`` False: a step is all prefill or all decode.
    ``max_prefills_per_step`` None: no limit. ``chunk_multiple``: a prefill chunk that does not end
    its prompt is a multiple of it. ``reserved_blocks``: KV blocks the platform keeps for itself,
    the null block included. ``max_num_seqs``, ``max_num_batched_tokens``: upper bounds, None for
    none; the ``default_`` ones are used when the configuration says nothing.
    """

    dtypes: tuple[str, ...]
    default_dtype: str
    block_sizes: tuple[int, ...] = (16,)
    head_sizes: tuple[int, ...] = ()
    mixed_batches: bool = True
    max_prefills_per_step: int | None = None
    chunk_multiple: int = 1
    reserved_blocks: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    default_max_num_seqs: int = 64
    default_max_num_batched_tokens: int = 2048
    async_scheduling: bool = False
    kv_cache_dtypes: tuple[str, ...] = ()


@frozen(kw_only=True)
class ForkSafety:
    """Whether this process could be forked for workers, and why (not)."""

    safe: bool
    reason: str


@frozen(kw_only=True)
class LoadReport:
    """What ``load_model`` did: bytes of weights now held by this worker, and seconds."""

    weight_bytes: int
    seconds: float


@frozen(kw_only=True)
class WarmUpReport:
    """Seconds spent by ``compile_or_warm_up_model`` on the language model and on encoders."""

    language_s: float
    encoder_s: float = 0.0


@frozen(kw_only=True)
class SleepReport:
    """What sleep, discard or wake did on one rank, by the allocator's accounting, in bytes."""

    bytes_freed: int
    bytes_backed_up: int
    bytes_still_held: int = 0


@frozen(kw_only=True)
class SavedTensor:
    """What a saved file holds of one tensor: its name in checkpoints, dtype, and the shape of the
    part that the rank has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@frozen(kw_only=True)
class SavedFile:
    """One file written by ``save_sharded_state``: its name, its SHA-256, its size, and what is in
    it, in order, where the platform says so.
    """

    name: str
    sha256: str
    num_bytes: int
    tensors: tuple[SavedTensor, ...] = ()


@frozen(kw_only=True)
class WorkerHealth:
    """What the control lane reports of one worker: its last step and since when (monotonic s) it is
    busy, or None.
    """

    rank: int
    step_id: int
    busy_since: float | None


@frozen(kw_only=True)
class Listener:
    """One socket that listens for other processes while an executor runs, as ``hardpoint doctor``
    tells of it.

    ``purpose`` is what for (``calls``), ``address`` where, as ``HOST:PORT`` with ``*`` for a port
    that is chosen when it is opened; ``owner`` who listens (``driver``, ``worker``, ``ray`` ...);
    ``protection`` what keeps strangers out, in a few words; ``until`` when it is closed.
    """

    purpose: str
    address: str
    owner: str
    protection: str
    until: str = "the end"


@frozen(kw_only=True)
class WorkerContext:
    """Who a worker is. Rank and world size are mandatory: nothing may guess them.

    ``devices`` are the logical ids this worker owns. ``rendezvous`` is the address of the
    collective library's rendezvous, None for a single worker. ``model_runner`` is the reference of
    the ModelRunner class that the driver chose. ``generation`` counts restarts of the whole group.
    ``cancelled()`` turns true when the driver wants this worker to leave its work at the next safe
    point. ``stages`` carries what pipeline stages hand on, where the executor does that itself;
    None: the collective library does.
    """

    config: Config
    rank: int
    local_rank: int
    world_size: int
    devices: tuple[str, ...] = ()
    rendezvous: str | None = None
    model_runner: str | None = None
    generation: int = 0
    cancelled: Callable[[], bool] = field(default=lambda: False, eq=False, repr=False)
    stages: StageCarrier | None = field(default=None, eq=False, repr=False)
