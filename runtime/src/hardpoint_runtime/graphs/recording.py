"""The recorder: what a function launches, as a list of operations over tensors.

Tensors that the function makes are *born* in it; all others (weights, caches, static buffers) are
read and written where they are. A recording keeps the others, but of the born ones only what they
look like: it holds no more memory than the function does. Views need no work and leave no trace. A
function may be recorded only if it does the same each time: what depends on values, on the host or
on chance is refused by name.

Used while a worker warms up, on its thread. Works on any torch device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from attrs import frozen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hardpoint_runtime.attention.metadata import AttentionMetadata
from hardpoint_runtime.graphs import refusals
from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.torch_operations import (
    Storage,
    leaves,
    run_parts,
    schema_of,
    storage_of,
    tensors_in,
)


@frozen(kw_only=True)
class Born:
    """Stands for a tensor that was born in a recording: a view of the memory ``storage``."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """How far into its memory it reaches."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        return (last + 1) * self.dtype.itemsize

    def within(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor in other memory: ``block``, uint8 [bytes]."""
        whole = block[: block.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return whole.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def born_in(tree: Any) -> list[Born]:
    """Return those of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Born)]


@frozen(kw_only=True, eq=False)
class Entry:
    """One recorded call. ``used`` are the born tensors among its arguments. ``born`` has, for each
    tensor that it returns, what it looks like if its memory is new, else None. ``writes``: it may
    change its arguments. ``eager``: it runs anew at each replay, as what it does depends on more
    than its tensors.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    used: tuple[Born, ...]
    born: tuple[Born | None, ...]
    writes: bool
    eager: bool = False


@frozen(kw_only=True, eq=False)
class Recording:
    """What a function did, in order, and what it returned."""

    entries: tuple[Entry, ...]
    output: Any


def record(function: Callable[[], Any], *, cuts: bool = False) -> Recording:
    """Call ``function`` once and return what it did. With ``cuts``, what goes through :func:`cut`
    stays eager.

    Raises GraphCaptureError for work that cannot be recorded, and what the function raises.
    """
    recorder = _Recorder(cuts)
    token = _current.set(recorder)
    try:
        with _HostReads(recorder), recorder:
            output = function()
    finally:
        _current.reset(token)
    return Recording(entries=tuple(recorder.entries), output=tree_map(recorder.seen, output))


def is_recording() -> bool:
    """Whether this thread or task records now."""
    return _current.get() is not None


def cut(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and return its result; a recording with cuts ends a segment before it and
    runs it anew at each replay.
    """
    recorder = _current.get()
    if recorder is None or not recorder.cuts:
        return function(*args, **kwargs)
    return recorder.whole(function, args, kwargs, eager=True)


def opaque(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and return its result; a recording keeps it whole, as one operation that
    may write its arguments.

    For work that torch does not dispatch, such as a collective: it takes and gives tensors, and
    does the same with the same ones. Called by whoever implements it.
    """
    recorder = _current.get()
    if recorder is None:
        return function(*args, **kwargs)
    return recorder.whole(function, args, kwargs, eager=False)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of its thread."""

    def __init__(self, cuts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cuts = cuts
        self.entries: list[Entry] = []
        self.paused = False
        # A weak reference keeps no memory, but the number of a storage from being given again.
        self._births: dict[Storage, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note it, or its parts if it is composed."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        with self:
            parts = run_parts(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        refusals.check(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(str(func), func, args, kwargs, result, writes=schema_of(func).is_mutable)
        return result

    def whole(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        eager: bool,
    ) -> Any:
        """Run ``function`` unseen and note it as one call."""
        if self.paused:
            return function(*args, **kwargs)
        self.paused = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.paused = False
        name = getattr(function, "__qualname__", repr(function))
        self._note(name, function, args, kwargs, result, writes=True, eager=eager)
        return result

    def _note(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        writes: bool,
        eager: bool = False,
    ) -> None:
        given = {storage_of(tensor) for tensor in tensors_in((args, dict(kwargs)))}
        args, kwargs = tree_map(self.seen, args), tree_map(self.seen, dict(kwargs))
        born = tuple(
            None if storage_of(tensor) in given else self._birth(tensor)
            for tensor in tensors_in(result)
        )
        if not writes and all(each is None for each in born):
            return  # a view, or a number known from shapes
        self.entries.append(
            Entry(
                name=name,
                function=function,
                args=args,
                kwargs=kwargs,
                used=tuple(born_in((args, kwargs))),
                born=born,
                writes=writes,
                eager=eager,
            )
        )

    def seen(self, value: Any) -> Any:
        """Return what a recording keeps of an argument."""
        if isinstance(value, torch.Tensor) and storage_of(value) in self._births:
            return _likeness(value)
        return value

    def _birth(self, tensor: torch.Tensor) -> Born:
        reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._births.setdefault(storage_of(tensor), reference)
        return _likeness(tensor)


def _likeness(tensor: torch.Tensor) -> Born:
    return Born(
        storage=storage_of(tensor),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
    )


_current: ContextVar[_Recorder | None] = ContextVar("hardpoint_graph_recorder", default=None)


class _HostReads(TorchFunctionMode):
    """Refuses the methods that read a host tensor's memory without any operation."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the name, then call."""
        if not self._recorder.paused:
            refusals.check_method(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def require_same(first: Recording, second: Recording) -> None:
    """Raise GraphCaptureError with the first difference between two recordings of one function,
    over different batches of a shape.
    """
    for difference in differences(first, second):
        raise GraphCaptureError(
            "the work depends on what the host knows of a batch, which a graph never sees again: "
            f"{difference}"
        )


def differences(first: Recording, second: Recording) -> Iterator[str]:
    """Give in words what two recordings of one function, over different batches, do differently.

    Memory born in them is compared by where it was born, other memory by identity.
    """
    places: tuple[dict[Storage, int], dict[Storage, int]] = ({}, {})
    for index, (one, other) in enumerate(zip(first.entries, second.entries, strict=False)):
        yield from _entry_differences(index, one, other, places)
        for place, entry in zip(places, (one, other), strict=True):
            place.update({born.storage: index for born in born_in(entry.born)})
    if len(first.entries) != len(second.entries):
        yield f"{len(first.entries)} operations, then {len(second.entries)}"


def _entry_differences(
    index: int,
    one: Entry,
    other: Entry,
    places: tuple[dict[Storage, int], dict[Storage, int]],
) -> Iterator[str]:
    if one.name != other.name:
        yield f"operation {index} is {one.name}, then {other.name}"
        return
    given = (leaves((e.args, dict(e.kwargs))) for e in (one, other))
    described = [
        [_described(leaf, place, eager=one.eager) for leaf in each]
        for each, place in zip(given, places, strict=True)
    ]
    if described[0] != described[1]:
        changed = [(a, b) for a, b in zip(*described, strict=False) if a != b]
        before, after = changed[0] if changed else described
        yield f"operation {index}, {one.name}, gets {before}, then {after}"


def _described(value: Any, places: Mapping[Storage, int], *, eager: bool) -> object:
    """Return what must be equal of an argument. An eager call is given each step's own metadata."""
    if eager and isinstance(value, AttentionMetadata):
        return AttentionMetadata
    if isinstance(value, Born):
        where, like = f"memory of operation {places[value.storage]}", value
    elif isinstance(value, torch.Tensor):
        where, like = f"memory {storage_of(value):#x}", _likeness(value)
    else:
        return value
    return f"a tensor of shape {like.shape}, strides {like.stride}, from {like.offset} of {where}"
