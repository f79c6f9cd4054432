"""A follower: joins the leader, starts its share of the workers, and ends with the leader."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zmq
from hardpoint.environment import merged
from hardpoint.errors import ExecutorFailedError, HardpointError
from hardpoint.rpc.claims import CallerClaims
from hardpoint.rpc.network.addresses import towards
from hardpoint.rpc.network.hub import RENDEZVOUS, codec_across
from hardpoint.rpc.network.key_file import JoinKeys
from hardpoint.rpc.network.lanes import WorkerLane
from hardpoint.rpc.network.link import REFUSED, Link

from hardpoint_multiproc import descriptors
from hardpoint_multiproc.group import STACK_SECONDS
from hardpoint_multiproc.hosts.handshake import Installation, files_of
from hardpoint_multiproc.hosts.started import Started, Told
from hardpoint_multiproc.nursery_process import NurseryProcess, how_ended, interpreter
from hardpoint_multiproc.start_choice import NURSERY, PLAIN, read_early

LOST = 3
"""Exit code of a follower whose leader ended without a word."""
_LOOK_S = 0.1
_AGAIN_S = 0.2


class LeaderLostError(HardpointError):
    """The leader ended, or cannot be reached.

    What to do: look at the leader. A follower that is to serve a new leader is started anew.
    """

    exit_code = LOST


class Follower:
    """One host's share of a group of workers.

    ``address`` is this host's, at which its workers listen (empty: the one from which packets to
    the leader leave). :meth:`run` returns when the leader has ended the group in good order.
    """

    def __init__(
        self,
        leader: tuple[str, int],
        keys: JoinKeys,
        own: Installation,
        *,
        node_rank: int | None,
        address: str,
        peer_timeout: float,
        start: str,
    ) -> None:
        self._leader = f"{leader[0]}:{leader[1]}"
        self._own = own
        self._node_rank = node_rank
        self._address = address or towards(*leader)
        self._peer_timeout = peer_timeout
        self._start = start
        self._codec = codec_across()
        self._workers: dict[int, Started] = {}
        self._output = Told()
        self._nursery: NurseryProcess | None = None
        self._forks = False
        self._waiting: list[Mapping[str, Any]] = []
        self._said: list[dict[str, Any]] = []
        self._saying = threading.Lock()
        self._heartbeat = 1.0
        self._broken: ExecutorFailedError | None = None
        self.ranks: list[int] = []
        """Those of this host, once it has joined."""
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, b"n" + secrets.token_bytes(15))
        self._socket.setsockopt(zmq.LINGER, 500)
        name = f"[{leader[0]}]" if ":" in leader[0] else leader[0]
        self._link = Link(
            self._socket,
            {
                "address": f"tcp://{name}:{leader[1]}",
                "server_key": keys.leader.public,
                "public": keys.follower.public,
                "secret": keys.follower.secret,
                "peer_timeout": peer_timeout,
                "source": address,
            },
        )

    def join(self, seconds: float) -> None:
        """Ask to be let in. Raises ExecutorFailedError, with the leader's reason, if it refuses,
        LeaderLostError if it is not there.
        """
        hello = {
            "op": "hello",
            "installation": self._own.told(),
            "node_rank": self._node_rank,
            "address": self._address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._put(hello)
        answer = self._answer(seconds)
        if answer["op"] == "files":
            self._put({**hello, "files": files_of(answer)})
            answer = self._answer(seconds)
        if answer["op"] != "welcome":
            raise ExecutorFailedError(f"the leader refused this host: {answer['reason']}")
        self._heartbeat = float(answer["heartbeat"])
        self.ranks = [int(rank) for rank in answer["ranks"]]

    def _answer(self, seconds: float) -> dict[str, Any]:
        if not self._link.comes(seconds):
            raise LeaderLostError(f"the leader at {self._leader} {self._why_not()}")
        return self._next()

    def _why_not(self) -> str:
        if self.was_refused:
            return "does not know this key"
        if self._link.lost:
            return (
                "is not there, has ended, or has other keys than this follower's --key-file: the "
                "connection was refused or closed"
            )
        return (
            "lets nobody in: all of its hosts have joined, and a group that is complete takes "
            "nobody else; or a firewall is between"
        )

    def run(self) -> None:
        """Do as the leader says until it ends the group. Raises LeaderLostError if it goes away,
        ExecutorFailedError if the workers here are lost.
        """
        heard, beat = time.monotonic(), 0.0
        while True:
            if self._broken is not None:
                raise self._broken
            stacks = any(worker.writes_stack for worker in self._workers.values())
            if self._link.comes(STACK_SECONDS if stacks else _LOOK_S):
                heard = time.monotonic()
                message = self._next()
                try:
                    if message["op"] == "stop":
                        return
                    self._obey(message)
                except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                    raise ExecutorFailedError(
                        f"the leader at {self._leader} says what is not understood: {error!r}"
                    ) from error
            now = time.monotonic()
            if self._link.lost or now - heard > self._peer_timeout:
                why = "ended" if self._link.lost else f"was not heard for {now - heard:.1f} s"
                raise LeaderLostError(f"the leader at {self._leader} {why}; its workers here end")
            if now >= beat:
                beat = now + self._heartbeat
                self._say({"op": "beat"})
            self._launch_waiting()
            for worker in list(self._workers.values()):
                self._tell_stack(worker.rank, worker.stack())
            self._flush()

    def close(self, why: str = "") -> None:
        """End every worker here and leave; ``why`` is told to a leader that is still there."""
        if why and not self._socket.closed and not self._link.lost:
            self._put({"op": "leaving", "why": why})
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            nursery.close(5.0)
        for worker in self._workers.values():
            worker.close()
        if not self._socket.closed:
            self._link.close()
            self._socket.close()
            self._context.term()

    @property
    def was_refused(self) -> bool:
        """Whether the leader is there and does not know this key."""
        return bool(self._link.lost & REFUSED)

    # What the leader wants.

    def _obey(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "start":
            self._waiting.append(message["packet"])
            self._begin_nursery(message["packet"])
        elif message["op"] == "signal" and self._nursery is not None:
            with suppress(ExecutorFailedError):
                self._nursery.tell({"op": "signal", "rank": message["rank"],
                                    "signal": int(message["signal"])})  # fmt: skip
        elif message["op"] == "stack" and message["rank"] in self._workers:
            self._workers[message["rank"]].ask_for_stack(last=bool(message["last"]))

    def _begin_nursery(self, packet: Mapping[str, Any]) -> None:
        if self._nursery is None:
            env, _ = merged(os.environ, packet["variables"])
            own = {name: value for name, value in env.items() if os.environ.get(name) != value}
            self._forks = self._start != PLAIN and packet["forks"] and not read_early(own)
            self._nursery = made = NurseryProcess(tuple(packet["preload"]) if self._forks else None)
            made.output.told = self._prints
            made.listen(self._heard, partial(self._nursery_died, made))

    def _launch_waiting(self) -> None:
        """Start the workers that wait for the nursery, once it is ready."""
        nursery = self._nursery
        if nursery is None or not self._waiting or not nursery.ready.done():
            return
        waiting, self._waiting = self._waiting, []
        way = NURSERY if self._forks and not nursery.ready.result() else PLAIN
        for packet in waiting:
            self._launch(nursery, way, packet)

    def _launch(self, nursery: NurseryProcess, way: str, packet: Mapping[str, Any]) -> None:
        rank = int(packet["rank"])
        variables, conflicts = merged(os.environ, packet["variables"])
        for line in conflicts:
            sys.stderr.write(f"rank {rank}: {line}\n")
        worker = self._workers[rank] = Started(rank)
        worker.lane = WorkerLane(packet["worker"]["lane"])
        worker.board = CallerClaims(int(packet["world_size"]))
        spec = {
            "rank": rank,
            "title": packet["title"],
            "env": variables,
            "path": list(sys.path),
            "cwd": os.getcwd(),  # noqa: PTH109
            "argv": list(sys.argv),
            "cores": None,
            "heartbeat": packet["heartbeat"],
            "codec": self._codec.name,
            "rendezvous": RENDEZVOUS,
            "place": rank,
            "channel": packet["worker"]["channel"],
        }
        give = worker.given.append
        give(descriptors.memory("spec", json.dumps(spec).encode()))
        give(nursery.output.add(rank, str(packet["title"])))
        give(worker.lane.end.detach())
        give(descriptors.memory("boot", packet["boot"]))
        worker.stacks = descriptors.memory("stacks")
        give(os.dup(worker.stacks))
        give(os.dup(worker.board.fd))
        give(descriptors.memory("rendezvous", json.dumps(packet["rendezvous"]).encode()))
        nursery.tell({"op": "start", "rank": rank, "way": way, "command": interpreter()},
                     worker.given)  # fmt: skip

    # What becomes of it, on the nursery's loop.

    def _heard(self, message: dict[str, Any], fds: list[int]) -> None:
        rank = int(message["rank"])
        worker = self._workers[rank]
        if message["op"] == "started" and fds:
            worker.pid, worker.pidfd = int(message["pid"]), fds.pop(0)
        descriptors.close(fds)
        if message["op"] == "started":
            given, worker.given = worker.given, []
            descriptors.close(given)
            self._say({"op": "started", "rank": rank, "pid": message["pid"]})
        elif message["op"] == "exited":
            if self._nursery is not None:
                self._nursery.output.last_lines(rank)  # it tells what was not read yet
            self._tell_stack(rank, worker.stack(ended=True))
            self._say({"op": "exited", "rank": rank, "exit": message["exit"]})
        else:
            self._say({"op": "failed", "rank": rank, "reason": str(message["reason"])})

    def _prints(self, rank: int, lines: Sequence[str]) -> None:
        if rank in self._workers:  # else it is the nursery that speaks
            self._output.add(rank, lines)

    def _tell_stack(self, rank: int, text: str | None) -> None:
        if text is not None:
            self._say({"op": "stack", "rank": rank, "text": text})

    def _nursery_died(self, nursery: NurseryProcess, code: int | None) -> None:
        self._broken = ExecutorFailedError(
            f"the nursery (pid {nursery.pid}) {how_ended(code)}, and the workers here with it"
        )

    # Talk.

    def _say(self, message: dict[str, Any]) -> None:
        """Have a message sent by the thread that owns the socket; any thread."""
        with self._saying:
            self._said.append(message)

    def _flush(self) -> None:
        with self._saying:
            said, self._said = self._said, []
        for rank, data in self._output.take():  # before what ``said`` has of the worker's end
            self._put({"op": "lines", "rank": rank, "data": data})
        for message in said:
            self._put(message)

    def _put(self, message: dict[str, Any]) -> None:
        data = bytes(self._codec.encode(message, "what the leader is told").data)
        with suppress(zmq.ZMQError):
            self._socket.send(data, zmq.NOBLOCK)

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = self._codec.decode(self._socket.recv(), "what the leader says")
        return message


def joined(
    leader: tuple[str, int], keys: JoinKeys, own: Installation, *, wait: float, **options: Any
) -> Follower:
    """Join the leader, which may not listen yet, within ``wait`` seconds; raises as
    :meth:`Follower.join`.
    """
    until = time.monotonic() + wait
    while True:
        follower = Follower(leader, keys, own, **options)
        try:
            follower.join(max(1.0, until - time.monotonic()))
        except LeaderLostError:
            follower.close()
            if follower.was_refused or time.monotonic() >= until:
                raise
            time.sleep(_AGAIN_S)
        except BaseException:
            follower.close()
            raise
        else:
            return follower
