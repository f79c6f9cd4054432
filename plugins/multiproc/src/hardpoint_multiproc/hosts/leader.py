"""The leader's side: followers join, are told what to start, and are watched.

:class:`Hosts` is to a :class:`hardpoint_multiproc.group.WorkerGroup` what a nursery is: local
workers are the nursery's as ever, the others are started and ended by their host's follower.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from attrs import define, evolve, field
from hardpoint.errors import HostLostError, StartTimeoutError
from hardpoint.rpc.network.bounds import Bounds
from hardpoint.rpc.network.gate import Gate
from hardpoint.rpc.network.hub import codec_across
from hardpoint.rpc.network.key_file import JoinKeys, RunFile
from hardpoint.rpc.zeromq.wakers import Waker

from hardpoint_multiproc.hosts.handshake import Installation, Model, difference
from hardpoint_multiproc.loop import Loop
from hardpoint_multiproc.nursery_process import NurseryProcess
from hardpoint_multiproc.output import Output

_logger = logging.getLogger("hardpoint.executor.mp")

JOIN = "join"
PROGRESS_SECONDS = 10.0
LARGEST = 1 << 20
"""Bytes of what a follower may say at once."""
MOST_AT_ONCE = 1000
"""What followers say is taken in turns, so that one that never stops keeps no other waiting."""
_LOOK_MS = 100


@define(eq=False)
class _Node:
    """One follower."""

    number: int
    name: bytes
    host: str
    address: str
    pid: int
    ranks: range
    heard: float
    pids: dict[int, int] = field(factory=dict)
    loss: HostLostError | None = None
    """That it is gone, once it is."""

    def __str__(self) -> str:
        return f"host {self.host} (node {self.number}, {self.address})"


class Hosts:
    """The nursery of this host and the followers of the others.

    ``ranks`` are those of each host, this one's first; ``own`` and the files of ``model`` are what
    must agree; ``made`` is the key file that was made for this run, which is removed as soon as all
    have joined. Raises what listening at ``address`` raises.
    """

    def __init__(
        self,
        nursery: NurseryProcess,
        keys: JoinKeys,
        address: tuple[str, int],
        ranks: Sequence[range],
        own: Installation,
        *,
        heartbeat: float,
        bounds: Bounds,
        model: Model | None = None,
        made: RunFile | None = None,
    ) -> None:
        self.nursery = nursery
        self._made = made
        self.loop: Loop = nursery.loop
        self.output: Output = nursery.output
        self._ranks = ranks
        self._own = own
        self._model = model
        self._heartbeat = heartbeat
        self._bounds = bounds
        self._codec = codec_across()
        self._nodes: dict[int, _Node] = {}
        self._by_name: dict[bytes, _Node] = {}
        self._outgoing: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._packets: dict[int, Mapping[str, Any]] = {}
        self._pipes: dict[int, int] = {}
        self._heard: Callable[[dict[str, Any], list[int]], None] | None = None
        self._lost: Callable[[HostLostError], None] | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._waker = Waker()
        self._gate = Gate(evolve(bounds, largest=LARGEST), keys.leader)
        try:
            self._door = self._gate.open(JOIN, *address)
            self._door.admit(keys.follower.public, "follower")
        except BaseException:
            self._gate.close()
            self._waker.close()
            raise
        self.address = self._door.address
        self._thread = threading.Thread(target=self._run, name="hardpoint-hosts", daemon=True)
        self._thread.start()

    # For the executor.

    def await_followers(self, seconds: float, key: str) -> None:
        """Wait until every other host has joined; say now and then who is awaited. Raises
        StartTimeoutError naming those that did not come within ``seconds``, HostLostError for one
        that came and is gone.
        """
        began = time.monotonic()
        next_word, pause = began + PROGRESS_SECONDS, PROGRESS_SECONDS
        wanted = range(1, len(self._ranks))
        with self._changed:
            while missing := [node for node in wanted if node not in self._nodes]:
                now = time.monotonic()
                if now - began >= seconds:
                    stages = {rank: f"node {node} has not joined" for node in missing
                              for rank in self._ranks[node]}  # fmt: skip
                    if knocked := self._knocked():
                        _logger.warning("not all have joined%s", knocked)
                    raise StartTimeoutError(seconds=now - began, stages=stages, key=key)
                if now >= next_word:
                    pause *= 2
                    next_word = now + pause
                    _logger.warning(
                        "waiting at %s for nodes %s to join, for %.0f s so far%s",
                        self.address,
                        missing,
                        now - began,
                        self._knocked(),
                    )
                self._changed.wait(0.5)
                self._require_all()
            self._require_all()
        self._door.hide()
        self._forget_keys()

    def _knocked(self) -> str:
        count = self._door.strangers
        return f"; {count} connections came with other keys than this group's" if count else ""

    def _forget_keys(self) -> None:
        if self._made is not None:
            self._made.remove()

    def _require_all(self) -> None:
        for node in self._nodes.values():
            if node.loss is not None:
                raise node.loss

    def addresses(self, own: str) -> list[str]:
        """Return the address of each rank's host; ``own`` is this one's."""
        found = [own] * len(self._ranks[0])
        for number in range(1, len(self._ranks)):
            found += [self._nodes[number].address] * len(self._ranks[number])
        return found

    def give(self, rank: int, packet: Mapping[str, Any]) -> None:
        """Have worker ``rank``, of another host, start with ``packet``."""
        self._packets[rank] = packet

    def on_lost(self, lost: Callable[[HostLostError], None]) -> None:
        """Have ``lost(error)`` called, on the loop's thread, when a follower is gone."""
        self._lost = lost

    # As a nursery.

    @property
    def pid(self) -> int | None:
        """The local nursery's process."""
        return self.nursery.pid

    @property
    def exit(self) -> int | None:
        """Its exit."""
        return self.nursery.exit

    def listen(
        self, heard: Callable[[dict[str, Any], list[int]], None], died: Callable[[int | None], None]
    ) -> None:
        """Have ``heard`` called for what becomes of workers anywhere, on the loop's thread."""
        self._heard = heard
        self.nursery.listen(heard, died)

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Start a worker, or signal one, where it lives; any thread."""
        rank = message["rank"]
        if rank in self._ranks[0]:
            self.nursery.tell(message, fds)
            return
        node = next(each for each in self._nodes.values() if rank in each.ranks)
        if message["op"] == "start":
            packet = dict(self._packets.pop(rank))
            self._pipes[rank] = self.output.add(rank, str(packet["title"]))
            self._send(node.name, {"op": "start", "rank": rank, "packet": packet})
            if node.loss is not None:  # before there was a group to fail
                self.loop.call(partial(self._tell_lost, node.loss))
        else:
            self._send(node.name, dict(message))

    def close(self, within: float) -> None:
        """Let the followers end, then the nursery. Idempotent."""
        if not self._ended.is_set():
            for node in list(self._nodes.values()):
                self._send(node.name, {"op": "stop"})
            self._ended.set()
            self._waker.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._gate.close()
            self._waker.close()
            for pipe in self._pipes.values():
                os.close(pipe)
            self._forget_keys()
        self.nursery.close(within)

    # On the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        poller.register(self._door.socket.getsockopt(zmq.FD), zmq.POLLIN)
        beat = 0.0
        while not self._ended.is_set():
            poller.poll(_LOOK_MS)
            self._waker.clear()
            self._read()
            self._flush()
            now = time.monotonic()
            if now >= beat:
                beat = now + self._heartbeat
                for node in list(self._nodes.values()):
                    self._put(node.name, {"op": "beat"})
            for node in list(self._nodes.values()):
                if node.loss is None and now - node.heard > self._bounds.peer_timeout:
                    late = f"it was not heard for {now - node.heard:.1f} s"
                    self._gone(node, late)
        self._flush()

    def _send(self, name: bytes, message: dict[str, Any]) -> None:
        self._outgoing.append((name, message))
        self._waker.wake()

    def _flush(self) -> None:
        while self._outgoing:
            self._put(*self._outgoing.popleft())

    def _put(self, name: bytes, message: dict[str, Any]) -> None:
        data = bytes(self._codec.encode(message, "what a follower is told").data)
        try:
            with self._door.lock:
                self._door.socket.send_multipart([name, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            node = self._by_name.get(name)
            if error.errno == zmq.EHOSTUNREACH and node is not None and not self._ended.is_set():
                self._gone(node, "its connection ended")

    def _read(self) -> None:
        for _ in range(MOST_AT_ONCE):
            with self._door.lock:
                if not int(self._door.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                frames = self._door.socket.recv_multipart(copy=False)
            if len(frames) != 2 or self._door.user_of(frames[0]) != "follower":
                continue
            name = frames[0].bytes
            try:
                message = self._codec.decode(frames[1].buffer, "what a follower says")
                self._take(name, message)
            except Exception as error:  # noqa: BLE001 - whatever it said, the others go on
                _logger.warning("a follower said what is not understood: %s", error)

    def _take(self, name: bytes, message: dict[str, Any]) -> None:
        node = self._by_name.get(name)
        if node is None:
            if message["op"] == "hello":
                self._greet(name, message)
            return
        node.heard = time.monotonic()
        op = message["op"]
        if op == "leaving":
            self._gone(node, str(message["why"]))
        elif op in ("started", "exited", "failed", "lines", "stack"):
            rank = int(message["rank"])
            if rank not in node.ranks:
                return
            if op == "lines":
                self._print(rank, bytes(message["data"]))
                return
            told = {key: message.get(key) for key in ("op", "pid", "exit", "reason", "text")}
            self.loop.call(partial(self._pass_on, {**told, "rank": rank, "host": str(node)}))

    def _print(self, rank: int, data: bytes) -> None:
        pipe = self._pipes.get(rank)
        if pipe is not None:
            os.set_blocking(pipe, False)
            with suppress(OSError):  # nobody reads so fast: what is too much is dropped
                os.write(pipe, data)

    def _pass_on(self, message: dict[str, Any]) -> None:
        if self._heard is not None:
            self._heard(message, [])

    def _greet(self, name: bytes, message: dict[str, Any]) -> None:
        host = str(message["host"])[:80]
        reason = ""
        number = message["node_rank"]
        with self._changed:
            free = [each for each in range(1, len(self._ranks)) if each not in self._nodes]
            if number is None:
                number = free[0] if free else len(self._ranks)
            number = int(number)
            reason = difference(self._own, Installation.heard(message["installation"]), host)
            if not reason and self._model is not None and "files" not in message:
                self._put(name, self._model.question())
                return
            if not reason and self._model is not None:
                reason = self._model.difference(message["files"], host)
            if not reason and not 1 <= number < len(self._ranks):
                reason = (
                    f"node rank {number} of {host} is not one of 1 to {len(self._ranks) - 1} "
                    "(nnodes at the leader counts itself), or all have joined"
                )
            pid = int(message.get("pid") or 0)
            if not reason and number in self._nodes:
                other = self._nodes[number]
                reason = (
                    f"node rank {number} was started twice: process {other.pid} on {other} has it, "
                    f"and process {pid} on host {host} asks for it"
                )
            if reason:
                _logger.warning("%s was refused: %s", host, reason)
                self._put(name, {"op": "refused", "reason": reason})
                return
            ranks = self._ranks[number]
            place = str(message["address"])
            node = _Node(number, name, host, place, pid, ranks, time.monotonic())
            self._put(name, {"op": "welcome", "node_rank": number, "ranks": list(ranks),
                             "heartbeat": self._heartbeat})  # fmt: skip
            self._nodes[number] = self._by_name[name] = node
            self._changed.notify_all()
        _logger.info("%s joined, with ranks %s", node, list(ranks))

    def _gone(self, node: _Node, why: str) -> None:
        with self._changed:
            if node.loss is not None:
                return
            node.loss = HostLostError(host=str(node), ranks=node.ranks, why=why)
            self._changed.notify_all()
        self.loop.call(partial(self._tell_lost, node.loss))
        for rank in node.ranks:
            told = {"op": "exited", "rank": rank, "exit": None, "host": str(node)}
            self.loop.call(partial(self._pass_on, told))

    def _tell_lost(self, error: HostLostError) -> None:
        if self._lost is not None:
            self._lost(error)
