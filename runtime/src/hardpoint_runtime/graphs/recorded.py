"""Recorded graphs: the operations of a function, replayed in place on the same memory.

What was born in a recording is given memory of a pool for its replays: a block serves the next
tensor once nobody reads the last one any more, within one graph and among all graphs of the pool.
A replay gives the same bits as the function would. This shows how graphs behave; it promises no
speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from attrs import define, field, frozen
from torch.utils._pytree import tree_map

from hardpoint_runtime.graphs.out_variants import Work, into
from hardpoint_runtime.graphs.recording import (
    Born,
    Entry,
    Recording,
    born_in,
    record,
    require_same,
)
from hardpoint_runtime.graphs.torch_operations import Storage

Allocate = Callable[[int], torch.Tensor]
"""Returns that many bytes on the device, as uint8."""


@define(eq=False)
class GraphPool:
    """Memory that the graphs captured with it share, so that only the results of the one replayed
    last are there. Made by ``DeviceOps.graph_pool``.
    """

    allocate: Allocate
    blocks: list[torch.Tensor] = field(factory=list)

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return sum(block.numel() for block in self.blocks)


@frozen(kw_only=True, eq=False)
class RecordedGraph:
    """Work in order, and the result that it leaves in place."""

    key: object
    work: tuple[Work, ...]
    output: Any

    def replay(self) -> Any:
        """Do the work again; return :attr:`output`, valid until the next replay of its pool."""
        for each in self.work:
            each.function(*each.args, **each.kwargs)
        return self.output


def record_graph(
    function: Callable[[], Any],
    key: object,
    pool: GraphPool,
    rehearsal: Callable[[], Any] | None = None,
) -> RecordedGraph:
    """Call ``function`` once and return its work as a graph. Called by ``DeviceOps.capture``.

    The bound ``replay`` of a recorded graph, as segments are, gives that graph. Raises
    GraphCaptureError, also if ``rehearsal`` does something else.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, RecordedGraph):
        return owner
    recording = record(function)
    if rehearsal is not None:
        require_same(recording, record(rehearsal))
    memory = Memory.lay_out(recording, pool)
    return RecordedGraph(key=key, work=memory.work(memory.entries), output=memory.output)


@frozen(kw_only=True, eq=False)
class Memory:
    """A recording with a place for everything that somebody reads. ``entries`` are those that
    count; ``output`` is where the result will be.
    """

    entries: tuple[Entry, ...]
    output: Any
    _blocks: Mapping[Storage, torch.Tensor]

    @classmethod
    def lay_out(cls, recording: Recording, pool: GraphPool) -> Self:
        """Give each tensor born in the recording a block of the pool, from its birth to its last
        use; to what is returned, until the end.
        """
        entries = _alive(recording)
        last = _last_uses(entries, recording.output)
        sizes = _sizes(entries, recording.output)
        free = list(pool.blocks)
        blocks: dict[Storage, torch.Tensor] = {}
        ending: dict[int, list[Storage]] = {}
        for index, entry in enumerate(entries):
            free += (blocks[storage] for storage in ending.pop(index - 1, ()))
            for storage in _births(entry):
                if storage in last:
                    blocks[storage] = _take(free, sizes[storage], pool)
                    ending.setdefault(last[storage], []).append(storage)
        return cls(
            entries=entries, output=tree_map(_mover(blocks), recording.output), blocks=blocks
        )

    def work(self, entries: Sequence[Entry]) -> tuple[Work, ...]:
        """Return what a replay of these entries does."""
        found = (self._work(entry) for entry in entries)
        return tuple(each for each in found if each is not None)

    def moved(self, tree: Any) -> Any:
        """Return nested tuples, lists and dictionaries with every born tensor at its place."""
        return tree_map(_mover(self._blocks), tree)

    def results(self, entry: Entry) -> tuple[torch.Tensor | None, ...]:
        """Return where the tensors of an entry go, None for those that nobody reads."""
        return tuple(
            self.moved(born) if born is not None and born.storage in self._blocks else None
            for born in entry.born
        )

    def _work(self, entry: Entry) -> Work | None:
        args, kwargs = self.moved(entry.args), self.moved(dict(entry.kwargs))
        results = self.results(entry)
        if all(result is None for result in results):
            return Work(entry.function, args, kwargs)
        return into(entry.function, args, kwargs, results)


def _births(entry: Entry) -> list[Storage]:
    return list(dict.fromkeys(born.storage for born in born_in(entry.born)))


def _alive(recording: Recording) -> tuple[Entry, ...]:
    """Return the entries that write what they were given, or give what an alive one reads."""
    read = {born.storage for born in born_in(recording.output)}
    alive: list[Entry] = []
    for entry in reversed(recording.entries):
        if entry.writes or not read.isdisjoint(_births(entry)):
            alive.append(entry)
            read.update(born.storage for born in entry.used)
    return tuple(reversed(alive))


def _last_uses(entries: Sequence[Entry], output: Any) -> dict[Storage, int]:
    """Return for all memory that is read the index of the entry that reads it last."""
    last = {born.storage: index for index, entry in enumerate(entries) for born in entry.used}
    return last | {born.storage: len(entries) for born in born_in(output)}


def _sizes(entries: Sequence[Entry], output: Any) -> dict[Storage, int]:
    """Return the bytes of each piece of memory that is born, as far as any tensor reaches."""
    sizes: dict[Storage, int] = {}
    for born in born_in([output, *((entry.used, entry.born) for entry in entries)]):
        sizes[born.storage] = max(sizes.get(born.storage, 1), born.num_bytes)
    return sizes


def _take(free: list[torch.Tensor], num_bytes: int, pool: GraphPool) -> torch.Tensor:
    """Remove and return the smallest free block of at least ``num_bytes``, or add one."""
    fitting = [(block.numel(), place) for place, block in enumerate(free)]
    fitting = [each for each in fitting if each[0] >= num_bytes]
    if fitting:
        return free.pop(min(fitting)[1])
    block = pool.allocate(num_bytes)
    pool.blocks.append(block)
    return block


def _mover(blocks: Mapping[Storage, torch.Tensor]) -> Callable[[Any], Any]:
    def move(value: Any) -> Any:
        return value.within(blocks[value.storage]) if isinstance(value, Born) else value

    return move
