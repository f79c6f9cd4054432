"""A flood of strangers, as a program of its own: ``flood.py COUNT HOST:PORT ...``.

It makes COUNT connections to the places in turn, says a part of a handshake on each, or nothing,
and holds them until its standard input ends. It prints how many came in, once all were tried.
"""

from __future__ import annotations

import resource
import socket
import sys
import time

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE"
count, places = int(sys.argv[1]), [word.rpartition(":") for word in sys.argv[2:]]
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, made = [], 0
for number in range(count):
    host, _, port = places[number % len(places)]
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex((host, int(port)))
    held.append(stranger)
    if number % 50 == 49:
        time.sleep(0.01)
        for each in held[-50:]:
            try:
                made += bool(each.send(GREETING[: number % 16]) + 1)
            except OSError:
                continue
print(made, flush=True)
sys.stdin.read()
