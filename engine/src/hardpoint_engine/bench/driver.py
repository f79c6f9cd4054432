"""One transport as the benchmark sees it: a process that is told to make calls."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardpoint.errors import HardpointError

from hardpoint_engine.bench.process_tree import cpu_seconds, descendants, kill_tree

HERE = Path(__file__).parent
FILES: Mapping[str, str] = {
    "hardpoint-mp": "hardpoint_mp.py",
    "pipe": "pipe.py",
    "zmq": "zeromq.py",
    "hardpoint-ray": "hardpoint_ray.py",
    "hardpoint-ray-legacy": "hardpoint_ray_legacy.py",
    "ray": "ray_actors.py",
    "ray-graph": "ray_graph.py",
    "vllm-mq": "vllm_queue.py",
}
"""Every transport, and its file in ``transports``."""
PATIENCE = 180.0
"""Seconds for any order."""
CLOSE_SECONDS = 30.0
ONE_THREAD: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a process whose libraries are not to compute side by side."""
QUIET_SHARE = 0.02
QUIET_WINDOW = 0.03
MOST_UNQUIET = 3.0
"""A transport is at rest when it used less than this share of a core for so many seconds; so many
are waited for that.
"""


class TransportMissingError(HardpointError):
    """The library of a transport is not installed.

    What to do: install it, or name an interpreter that has it (``--peer
    vllm=PYTHON``, ``--peer ray=PYTHON``).
    """


class TransportFailedError(HardpointError):
    """A transport did not do what it was told.

    What to do: run again with this transport alone (``--transport``) and read what it prints.
    """


class Driver:
    """Starts the process at once, with the interpreter ``python``; :meth:`opened` waits for it.

    ``script``: what ``orders.py`` runs, with its arguments, instead of a transport's calls, in the
    environment ``environ``. ``patience``: seconds for any order.
    """

    def __init__(
        self,
        name: str,
        python: str = sys.executable,
        *,
        script: Sequence[str] = (),
        environ: Mapping[str, str] = ONE_THREAD,
        patience: float = PATIENCE,
    ) -> None:
        self.name = name
        self._patience = patience
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the driver
        self._pending = b""
        self.processes: tuple[int, ...] = ()
        if not script:
            script = (str(HERE / "turns.py"), str(HERE / "transports" / FILES[name]))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter that the caller chose
                [python, str(HERE / "orders.py"), *script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **environ},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._log.close()
            raise TransportMissingError(f"{python} cannot be run: {error.strerror}") from None

    def opened(self) -> None:
        """Wait until its library is loaded. Raises TransportMissingError."""
        self._answer("load the library")
        self.processes = descendants(self._process.pid)

    def start(self, workers: int) -> None:
        """Start workers."""
        self.tell("start", workers=workers)
        self.processes = descendants(self._process.pid)

    def stop(self) -> None:
        """End the workers."""
        self.tell("stop")

    def tell(self, order: str, **how: Any) -> dict[str, Any]:
        """Have an order carried out and return the answer. Raises TransportFailedError."""
        line = json.dumps({"do": order, **how}).encode() + b"\n"
        stdin = self._process.stdin
        if stdin is None:
            raise TransportFailedError(f"{self.name} has no standard input")
        with contextlib.suppress(BrokenPipeError):  # its answer, or the lack of one, tells more
            stdin.write(line)
        return self._answer(order)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes so far."""
        return cpu_seconds(self.processes)

    def settle(self) -> bool:
        """Wait until its processes are at rest, so that the next one has the machine: some go on
        spinning for a second after a call. Return whether they are.
        """
        end = time.monotonic() + MOST_UNQUIET
        while time.monotonic() < end:
            before = self.cpu_seconds()
            time.sleep(QUIET_WINDOW)
            if self.cpu_seconds() - before < QUIET_SHARE * QUIET_WINDOW:
                return True
        return False

    def release(self) -> None:
        """Have it end, and do not wait for that: :meth:`close` does."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End its processes at once; :meth:`close` gives back the rest."""
        kill_tree(self._process.pid)

    def close(self) -> None:
        """Have it end; whatever of it is left after that is killed."""
        try:
            self.release()
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()
        except BaseException:
            kill_tree(self._process.pid)
            raise
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()

    def _answer(self, order: str) -> dict[str, Any]:
        line = self._line(order)
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if (missing := answer.get("missing")) is not None:
            raise TransportMissingError(missing)
        if (error := answer.get("error")) is not None:
            self._log.seek(0)
            last = "\n  ".join(self._log.read().strip().splitlines()[-8:])
            raise TransportFailedError(f"{self.name} failed to {order}: {error}\n  {last}".strip())
        return answer

    def _line(self, order: str) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise TransportFailedError(f"{self.name} has no standard output")
        end = time.monotonic() + self._patience
        while b"\n" not in self._pending:
            if not select.select([stdout.fileno()], [], [], max(0.0, end - time.monotonic()))[0]:
                kill_tree(self._process.pid)
                raise TransportFailedError(
                    f"{self.name} did not {order} within {self._patience:g} s"
                )
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                return b""
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line
