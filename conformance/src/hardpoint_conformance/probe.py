"""The probe: what the kit cannot see through the contracts, told by the plugin's author.

A subclass is found by the entry point group ``hardpoint.conformance`` (the name is the plugin's,
the object the class). A plugin without one is certified with what is here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hardpoint.errors import PluginLoadError

if TYPE_CHECKING:
    from hardpoint.checkpoints.description import ModelDescription
    from hardpoint.worker import Worker

    from hardpoint_conformance.oracle import Oracle

GROUP = "hardpoint.conformance"
"""The entry point group of probes."""


class Probe:
    """Looks inside one plugin. Every method is optional; each says what it is when left out.

    Built by the kit in the test's process, one for each suite. Static methods run where they are
    said to run and must not depend on this object.
    """

    settings: ClassVar[Mapping[str, object]] = {}
    """Configuration under which the plugin is certified (``plugins.acme.backend``: ...), beside
    what the kit sets itself. Default: none. The certificate lists it.
    """
    num_workers: ClassVar[int | None] = None
    """Of an executor: with how many workers it is certified. Default: two, or one where it refuses
    two with a ConfigError.
    """
    logit_tolerance: ClassVar[float | None] = None
    """How far log-probabilities may be from the oracle's. Default: by dtype (1e-3 for float32, 0.25
    for 16 bits).
    """

    loads_shards: ClassVar[bool] = True
    """Whether what ``save_sharded_state`` writes can be loaded again (a fake model has nothing to
    load). Default: yes.
    """

    def oracle(self, description: ModelDescription) -> Oracle | None:
        """Return what computes the same model by other means. Default: None, for the kit's own
        reference (a Llama in numpy, float32).

        The certificate says which one was used. One of your own that has no ``adapted`` leaves LoRA
        adapters uncompared, and the certificate says that, too. Called in the test's process.
        """
        return None

    def tracing(self, folder: str) -> Mapping[str, object]:
        """Return the configuration by which ``profile`` writes its files into ``folder``. Default:
        the key ``profile_folder``.
        """
        return {"profile_folder": folder}

    @staticmethod
    def held_bytes(worker: Worker) -> int | None:
        """Return the bytes of device memory that this worker's process holds now. Default: None, by
        which the kit goes by the reports of the contract alone. Called in the worker.
        """
        return None

    @staticmethod
    def initialised() -> bool:
        """Whether the device's runtime is initialised in this process. Default: no; the kit looks
        at imported modules and open device files itself. Called in a fresh process, after
        discovery, selection and validation.
        """
        return False

    def visible_devices(self, mask: str) -> tuple[str, ...] | None:
        """Return the ids of the devices that the platform would use under ``mask`` (the value of
        its own variable for visible devices: ``"3,6"``, or two ids in UUID form). Default: None, it
        has no such variable. Called in the test's process; must touch no device.
        """
        return None

    def live_children(self, pids: frozenset[int]) -> frozenset[int]:
        """Return those of ``pids`` (worker processes that were seen) that still run. Default: by
        signal 0. Called in the test's process, after a shutdown.
        """
        return frozenset(pid for pid in pids if _runs(pid))

    def kill(self, pid: int) -> None:
        """End one worker's process at once, as a fault would. Default: SIGKILL. For workers that
        are not processes of this host, do what their launcher offers.
        """
        os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def find_probe(name: str) -> Probe:
    """Return the probe of plugin ``name``: its author's, or the default one.

    Raises PluginLoadError for an entry point that does not lead to a subclass of Probe, with what
    loading it raised.
    """
    for entry in entry_points(group=GROUP, name=name):
        told = f"entry point {name} = {entry.value} in {GROUP}"
        try:
            kind = entry.load()
        except Exception as error:
            raise PluginLoadError(
                f"{told} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, Probe)):
            raise PluginLoadError(
                f"{told} leads to {kind!r}; it must be a subclass of hardpoint_conformance.Probe"
            )
        return kind()
    return Probe()
