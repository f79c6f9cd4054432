"""A Communicator for ranks of one host, over memory that they share. No sockets, no threads.

Every rank has two slots in the group's region. An operation is a turn: write into the slot of the
turn's parity, publish the turn's number, wait until all have published it, read everybody's slot.
Two slots suffice: who publishes turn n has read all of turn n - 1, so when a rank has seen
everybody's n nobody reads n - 1 any more, and n + 1 may overwrite it. Beside the number stands what
the turn is for, so that ranks that disagree find out. All sum in the order of the members, so that
all get the same bits.

Point to point there is a ring of pieces for each ordered pair, written until it is full; a ring
that was read empty starts again at its first piece, so that small messages stay in few pages.

A wait yields the processor for a moment, then sleeps, a little longer each time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from hardpoint_runtime.parallel.arena import Arena
from hardpoint_runtime.parallel.communicator import (
    Communicator,
    Meeting,
    Pending,
    Sent,
    TensorShape,
)
from hardpoint_runtime.parallel.errors import CollectiveEndedError
from hardpoint_runtime.parallel.groups import Group

Tensor = torch.Tensor

SLOT = 1 << 20
"""Bytes of a slot; larger tensors take several turns."""
PIECE = 1 << 18
"""Bytes of a piece of a ring."""
PIECES = 64
"""Pieces of a ring: a message up to their sum is sent without waiting for its receiver. Memory that
is never written is never there.
"""

LINE = 8
"""Words of 8 bytes in a cache line; what one rank writes has lines of its own."""
ENDED = 0
"""The word that ends the group."""

YIELDS = 16
"""Times that a wait yields between two looks at the clock."""
NAPS = (20e-6, 1e-3)
"""Seconds of the shortest nap of a wait and of the longest."""
NAP_SHARE = 0.05
"""The part that a nap adds, at most, to how long was waited already."""
LOOK = 5e-3
"""Seconds between two looks at what else may end a wait."""

OPERATIONS = {
    name: code
    for code, name in enumerate(("join", "barrier", "all_reduce", "all_gather", "broadcast"), 1)
}


class SharedMemoryCommunicator(Communicator):
    """One rank's end. Joins on construction, and waits there until every member has joined."""

    def __init__(self, group: Group, meeting: Meeting, path: str) -> None:
        super().__init__(group, meeting)
        self._arena = Arena(path)
        self._lock = threading.Lock()
        self._turn = 0
        self._broken: BaseException | None = None
        try:
            self._map()
            self._arena.sign(group.name, self.index)
            self._take_turn("join", 0)
        except BaseException:
            self.close()
            raise

    def _map(self) -> None:
        size = self.size
        self._peers = [peer for peer in range(size) if peer != self.index]
        pairs, entries = LINE * (1 + size), LINE * (1 + size + 2 * size * size)
        header = (entries + size * size * PIECES * 2) * 8
        header = -(-header // mmap.PAGESIZE) * mmap.PAGESIZE
        slots = size * 2 * SLOT
        rings = size * size * PIECES * PIECE
        self._memory = self._arena.region(self.group.name, header + slots + rings)
        self._words: memoryview | None = memoryview(self._memory)[:header].cast("q")
        self._members = [LINE * (1 + member) for member in range(size)]
        self._pairs = {
            (a, b): _Ring(
                written=pairs + 2 * LINE * (a * size + b),
                read=pairs + 2 * LINE * (a * size + b) + LINE,
                entries=entries + (a * size + b) * PIECES * 2,
                start=header + slots + (a * size + b) * PIECES * PIECE,
            )
            for a in range(size)
            for b in range(size)
            if a != b and self.index in (a, b)
        }
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = self._bytes[header : header + slots].view(size, 2, SLOT)
        self._typed: dict[torch.dtype, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    # Operations of all.

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in the order of the members; more than two 16-bit numbers in float32."""
        flat = tensor.reshape(-1)
        step = SLOT // tensor.itemsize
        total = flat.numel()
        for start in range(0, total, step):
            piece = flat if total <= step else flat[start : start + step]
            slots = self._exchange("all_reduce", piece, total, len(piece))
            _sum(slots, piece)
        return flat.view(tensor.shape)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """Exchange flat; joined along ``dim`` in one copy where everything fits the slots."""
        dim %= tensor.dim()
        shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
        counts = [_product(shape) for shape in shapes]
        flat = tensor.reshape(-1)
        step, total, largest = SLOT // tensor.itemsize, sum(counts), max(counts)
        if tensor.shape[dim] != sizes[self.index]:
            raise ValueError(
                f"all_gather: {tensor.shape[dim]} along dimension {dim}, where sizes says "
                f"{sizes[self.index]}"
            )
        if 0 < largest <= step:
            slots = self._exchange("all_gather", flat, total, largest)
            parts = [s[:n].view(shape) for s, n, shape in zip(slots, counts, shapes, strict=True)]
            return torch.cat(parts, dim)
        whole = [torch.empty(count, dtype=tensor.dtype) for count in counts]
        for start in range(0, largest, step):
            slots = self._exchange("all_gather", flat[start : start + step], total, step)
            for part, slot in zip(whole, slots, strict=True):
                if len(target := part[start : start + step]):
                    target.copy_(slot[: len(target)])
        return torch.cat([w.view(s) for w, s in zip(whole, shapes, strict=True)], dim)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Only the source writes."""
        flat = tensor.reshape(-1)
        step, total = SLOT // tensor.itemsize, flat.numel()
        mine = source == self.index
        for start in range(0, total, step):
            piece = flat[start : start + step]
            given = piece if mine else piece[:0]
            slots = self._exchange("broadcast", given, total, len(piece))
            if not mine:
                piece.copy_(slots[source])
        return flat.view(tensor.shape)

    def barrier(self) -> None:
        """Take a turn without data."""
        self._take_turn("barrier", 0)

    def _exchange(self, operation: str, mine: Tensor, agreed: int, length: int) -> Sequence[Tensor]:
        """Show ``mine`` to all; return the first ``length`` elements of everybody's slot, which
        stay as they are until the next turn but one.
        """
        typed = self._typed.get(mine.dtype) or self._view_as(mine.dtype)
        slots = typed[(self._turn + 1) & 1]
        if mine.numel():
            slots[self.index][: mine.numel()].copy_(mine)
        self._take_turn(operation, agreed)
        return [slot[:length] for slot in slots]

    def _view_as(self, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        with torch.inference_mode(mode=False):
            even, odd = (
                tuple(self._slots[member, parity].view(dtype) for member in range(self.size))
                for parity in (0, 1)
            )
        self._typed[dtype] = even, odd
        return even, odd

    def _take_turn(self, operation: str, agreed: int) -> None:
        words = self._open(operation)
        self._turn = turn = self._turn + 1
        purpose = OPERATIONS[operation] << 48 | agreed
        mine = self._members[self.index]
        words[mine + 1 + (turn & 1)] = purpose
        self._fence()
        words[mine] = turn
        for peer in self._peers:
            place = self._members[peer]
            if words[place] < turn:
                self._wait(
                    operation, lambda: self._late(turn), partial(_reached, words, place, turn)
                )
            if (theirs := words[place + 1 + (turn & 1)]) != purpose:
                self.mismatch(operation, peer, f"came with {_purpose(theirs)}, not {agreed}")
        self._fence()

    def _late(self, turn: int) -> list[int]:
        words = self._words
        return [] if words is None else [p for p in self._peers if words[self._members[p]] < turn]

    # From one to one.

    def send(self, tensors: Mapping[str, Tensor], to: int) -> Pending:
        """Copy into the ring; waits for the receiver only where the ring is full."""
        words, ring = self._open("send"), self._pairs[self.index, to]
        for tensor in tensors.values():
            for piece in _pieces(tensor.contiguous()):
                written = words[ring.written]
                if written - words[ring.read] >= PIECES:
                    freed = written - PIECES + 1
                    self._wait("send", lambda: [to], partial(_reached, words, ring.read, freed))
                if words[ring.read] == written:
                    ring.cursor = 0
                self._piece(ring, ring.cursor, len(piece)).copy_(piece)
                entry = ring.entries + 2 * (written % PIECES)
                words[entry], words[entry + 1] = ring.cursor, len(piece)
                ring.cursor = (ring.cursor + 1) % PIECES
                self._fence()
                words[ring.written] = written + 1
        return Sent()

    def receive(self, shapes: Mapping[str, TensorShape], source: int) -> dict[str, Tensor]:
        """Copy out of the ring."""
        words, ring = self._open("receive"), self._pairs[source, self.index]
        received = {}
        for name, shape in shapes.items():
            received[name] = tensor = shape.empty()
            for piece in _pieces(tensor):
                read = words[ring.read]
                if words[ring.written] <= read:
                    sent = partial(_reached, words, ring.written, read + 1)
                    self._wait("receive", lambda: [source], sent)
                self._fence()
                entry = ring.entries + 2 * (read % PIECES)
                cursor, length = words[entry], words[entry + 1]
                if length != len(piece):
                    self.mismatch(
                        "receive",
                        source,
                        f"sent {length} bytes where {len(piece)} of {name!r} {shape.shape} are due",
                    )
                piece.copy_(self._piece(ring, cursor, length))
                self._fence()
                words[ring.read] = read + 1
        return received

    def _piece(self, ring: _Ring, index: int, length: int) -> Tensor:
        start = ring.start + index * PIECE
        return self._bytes[start : start + length]

    # The end.

    def end(self) -> None:
        """Release this rank's waits, and those of the others too."""
        super().end()
        with self._lock:
            if self._words is not None:
                self._words[ENDED] = 1

    def close(self) -> None:
        """Take back the sign of life and unmap the region."""
        with self._lock:
            words, self._words = self.__dict__.get("_words"), None
            if words is not None:
                words.release()
        self._arena.close()
        memory = self.__dict__.pop("_memory", None)
        for name in ("_bytes", "_slots", "_typed"):
            self.__dict__.pop(name, None)
        if memory is not None:
            with contextlib.suppress(BufferError):  # a tensor is still looked at; unmapped with it
                memory.close()

    # Waiting.

    def _open(self, operation: str) -> memoryview:
        if self._words is None or self._broken is not None:
            raise CollectiveEndedError(
                "the group was left" if self._broken is None else f"it failed: {self._broken}",
                group=str(self.group),
                operation=operation,
            ) from self._broken
        return self._words

    def _wait(
        self, operation: str, missing: Callable[[], Sequence[int]], ready: Callable[[], bool]
    ) -> None:
        """Return once ``ready()``; raise as :meth:`Communicator.check_wait` says."""
        begun = look = now = time.monotonic()
        while now < begun + self.meeting.spin:
            for _ in range(YIELDS):
                if ready():
                    return
                os.sched_yield()
            now = time.monotonic()
        shortest, longest = NAPS
        try:
            while not ready():
                if now >= look:
                    self._look(operation, begun + self.meeting.timeout, missing, ready)
                    look = now + LOOK
                time.sleep(min(max(NAP_SHARE * (now - begun), shortest), longest))
                now = time.monotonic()
        except BaseException as error:
            self._broken = error
            raise

    def _look(
        self,
        operation: str,
        deadline: float,
        missing: Callable[[], Sequence[int]],
        ready: Callable[[], bool],
    ) -> None:
        if self._words is not None and self._words[ENDED]:
            self.meeting.ended.set()
        self.check_wait(operation, deadline, missing, lambda: self._lost(missing, ready))

    def _lost(
        self, missing: Callable[[], Sequence[int]], ready: Callable[[], bool]
    ) -> Sequence[int]:
        words = self._words
        if words is None:
            return ()
        joined = [peer for peer in missing() if words[self._members[peer]] > 0]
        gone = self._arena.lost(self.group.name, joined)
        if not gone or ready():
            return ()
        # Looked at again: who came and left in between is missed by nobody.
        still = missing()
        return [peer for peer in gone if peer in still]

    def _fence(self) -> None:
        """Order this rank's loads and stores before with those after, as any lock does; processors
        that need no order (x86) pay some 50 ns.
        """
        with self._lock:
            pass


class _Ring:
    """Places of one ordered pair: words of the counters and entries, the bytes of the pieces."""

    def __init__(self, *, written: int, read: int, entries: int, start: int) -> None:
        self.written = written
        self.read = read
        self.entries = entries
        self.start = start
        self.cursor = 0


def _reached(words: memoryview, place: int, count: int) -> bool:
    reached: bool = words[place] >= count
    return reached


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.view(-1).view(torch.uint8)
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def _sum(parts: Sequence[Tensor], out: Tensor) -> None:
    if len(parts) > 2 and out.is_floating_point() and out.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _purpose(word: int) -> str:
    code, agreed = word >> 48, word & ((1 << 48) - 1)
    names = {code: name for name, code in OPERATIONS.items()}
    return f"{names.get(code, code)} of {agreed}"


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
