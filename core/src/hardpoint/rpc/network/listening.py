"""Where a process listens, as the kernel says; for those who check that it is what was told."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the (address, port) pairs at which process ``pid`` listens by TCP; on Linux, for
    processes of this user. Empty for one that is gone.
    """
    own = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                own.add(str(link.readlink()))
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                    host, _, port = fields[1].partition(":")
                    found.add((_address(host), int(port, 16)))
    return found


def _address(text: str) -> str:
    """Return an address of the kernel's table: 32-bit words in the processor's order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
