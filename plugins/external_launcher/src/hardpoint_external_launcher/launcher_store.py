"""torch's store that a launcher serves at MASTER_ADDR and MASTER_PORT, as torchrun does.

It is open to anybody, and who floods it can keep ranks from meeting: until their deadline, no
longer. So only ranks on several hosts use it, who have no other way to find each other, and what
they write there is sealed by their key file.
"""

from __future__ import annotations

import importlib
import socket
import threading
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from hardpoint.rpc.network.store import StoreLostError


def torch_store(address: str, port: int, patience: float) -> Any:
    """Return torch's way to it. Raises StoreLostError while nobody listens there, and for what
    listens there and does not answer: torch would wait for a word of it for ever, whatever its
    timeout, so that is another thread's to do.
    """
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError as error:
        raise StoreLostError(f"nobody serves the launcher's store: {error}") from error
    distributed: Any = importlib.import_module("torch.distributed")
    made: SimpleQueue[Any] = SimpleQueue()

    def make() -> None:
        given = {"timeout": timedelta(seconds=patience), "wait_for_workers": False}
        try:
            made.put(distributed.TCPStore(address, port, **given))
        except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
            made.put(error)

    threading.Thread(target=make, name="hardpoint-store", daemon=True).start()
    try:
        found = made.get(timeout=patience)
    except Empty:
        raise StoreLostError("the launcher's store does not answer") from None
    if isinstance(found, Exception):
        raise StoreLostError(f"the launcher's store cannot be used: {found}") from found
    return found
