"""What crosses to and from a worker, as bytes: the only module that names a pickler.

Local channels only: the bytes never come from a network. What is immutable and known (numbers,
text, the frozen step messages) is carried by reference where driver and worker share a process.
Everything else is copied, so that an in-process worker shares no mutable state with the driver and
a value has the same fate on every local channel.
"""

from __future__ import annotations

import functools
import marshal
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import cloudpickle  # type: ignore[import-untyped]
from attrs import define

from hardpoint.errors import EncodingError
from hardpoint.isolation import text_of
from hardpoint.messages import (
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    StepTicket,
)

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Immutable values of these exact types need no copy."""

STEP_MESSAGES = frozenset(
    {SchedulerOutput, ModelRunnerOutput, StepTicket, GrammarOutput, DraftTokenIds}
)
"""The frozen messages of a step: never copied within a process, they are the hot path."""

_CARRIED = PLAIN | STEP_MESSAGES
_MOST_ITEMS = 64
_DEEPEST = 40


@define
class Carried:
    """A value on its way within one process, by reference; the result ``of`` a call, if any."""

    value: Any
    of: str = ""


class Encoded(NamedTuple):
    """A value as it travels: what :func:`encode_apart` made of it."""

    data: bytes | memoryview
    buffers: Sequence[memoryview] = ()


@runtime_checkable
class Foreign(Protocol):
    """A parcel of another codec, which alone can open it."""

    def unpack(self, where: str, of: str) -> Any:
        """Return the value; raise EncodingError."""


Parcel = bytes | Carried | Encoded | Foreign

PICKLED = 0x80
"""The first byte of whatever was pickled; nothing that :data:`dumps_plain` makes begins with it."""

dumps_plain: Callable[[Any, int], bytes] = marshal.dumps
loads_plain: Callable[[bytes], Any] = marshal.loads
PLAIN_VERSION = 2
"""For the hottest path: of one PLAIN value, or a tuple of them, in half of the time of a pickle.
(Later versions of marshal's format keep a table of what occurs twice: it costs more than it saves.)
"""
loads: Callable[[bytes], Any] = pickle.loads
"""Of pickled data without buffers; :func:`unusable` tells of an error."""

OUT_OF_BAND = 65536
"""Bytes from which a buffer inside a value (an array's, say) travels apart, without a copy."""
LARGE_BYTES = 1 << 18
"""Bytes from which an argument or result of the type bytes does; smaller ones are sooner copied."""


def encode(value: object, where: str) -> bytes:
    """Encode any value, functions included. Called by whoever sends.

    Raises EncodingError naming the path to what cannot be encoded; ``where`` begins that path.
    """
    try:
        data: bytes = cloudpickle.dumps(value, protocol=5)
    except Exception as error:
        raise _refusal(value, where, error) from error
    return data


def _refusal(value: object, where: str, error: Exception) -> EncodingError:
    path, offender = _find_offender(value, where)
    return EncodingError(
        f"{path} cannot be sent between driver and worker: {type(offender).__qualname__} "
        f"is not encodable ({_one_line(error)}). Send plain data instead."
    )


class Apart:
    """Bytes on their way that travel apart, as an array does; they arrive as bytes."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: object) -> tuple[type[bytes], tuple[pickle.PickleBuffer]]:
        return bytes, (pickle.PickleBuffer(self.value),)


def is_large(value: object) -> bool:
    """Whether a value is bytes that travel apart."""
    return type(value) is bytes and len(value) >= LARGE_BYTES


def set_apart(value: object) -> object:
    """Return what to encode in place of a value: of LARGE_BYTES, an Apart; else itself."""
    return Apart(value) if is_large(value) else value  # type: ignore[arg-type]


def encode_apart(value: object, where: str) -> Encoded:
    """Encode any value, its large buffers apart and uncopied; called by whoever sends to another
    process. Raises EncodingError as :func:`encode`.
    """
    value = set_apart(value)
    buffers: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: it is copied into the stream
            return True
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(value, 5, buffer_callback=stays)
        if not _means_main(data):
            return Encoded(data, buffers)
    except Exception:  # noqa: BLE001 - whatever it is, the thorough way tells
        data = b""
    buffers.clear()
    try:
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=stays)
    except Exception as error:
        raise _refusal(value, where, error) from error
    return Encoded(data, buffers)


def _means_main(data: bytes) -> bool:
    """Whether the fast pickler may have named something of ``__main__``, which is another module in
    another process; by-value registration is for cloudpickle to honour too.
    """
    return b"\x08__main__" in data or bool(cloudpickle.list_registry_pickle_by_value())


def decode(
    data: bytes | memoryview, where: str, of: str = "", buffers: Sequence[memoryview] = ()
) -> Any:
    """Decode what :func:`encode` or :data:`dumps_plain` made; raise EncodingError if its own code
    fails to rebuild it, by whatever exception. ``where`` and the call that it is ``of`` are for the
    error's text.
    """
    try:
        if len(data) and data[0] != PICKLED:
            return marshal.loads(data)  # noqa: S302 - bytes of our own local channel only
        return pickle.loads(data, buffers=buffers)  # noqa: S301 - as above
    except BaseException as error:
        raise unusable(where, of, error) from error


def unusable(where: str, of: str, error: BaseException) -> EncodingError:
    """Return the error of data that :data:`loads` failed to rebuild by ``error``."""
    what = f"{where} of {of!r}" if of else where
    return EncodingError(
        f"{what} was sent but cannot be rebuilt here ({_one_line(error)}). Its class must be "
        f"importable and able to be copied by pickle."
    )


def pack(value: object, where: str) -> Parcel:
    """Prepare a value for a worker of the same process: by reference if immutable, else encoded."""
    return Carried(value) if immutable(value) else encode(value, where)


def unpack(parcel: Parcel, where: str, of: str = "") -> Any:
    """Return the value in a parcel of :func:`pack`, or in one that a channel brought."""
    kind = type(parcel)
    if kind is bytes:
        return decode(parcel, where, of)  # type: ignore[arg-type]
    if kind is Carried:
        return parcel.value  # type: ignore[union-attr]
    if kind is Encoded:
        return decode(parcel.data, where, of, parcel.buffers)  # type: ignore[union-attr]
    return parcel.unpack(where, of)  # type: ignore[union-attr]


def pack_arguments(
    method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> Parcel:
    """Pack what a call carries; unpacked, it is the tuple (method, args, kwargs)."""
    body = (method, args, kwargs)
    if type(method) is str and immutable(args) and (not kwargs or _immutable_values(kwargs)):
        return Carried(body)
    try:
        data: bytes = cloudpickle.dumps(body, protocol=5)
    except Exception as error:
        for path, part in ((f"method of {name!r}", method), ("args", args), ("kwargs", kwargs)):
            encode(part, path)
        raise EncodingError(f"the call of {name!r} cannot be sent: {_one_line(error)}") from error
    return data


def encode_exception(error: BaseException) -> bytes | None:
    """Encode an exception if its copy is of the same type; None if it cannot be brought over."""
    try:
        data: bytes = cloudpickle.dumps(error, protocol=5)
        copy = pickle.loads(data)  # noqa: S301 - made in the line above
    except BaseException:  # noqa: BLE001 - its own code may raise anything; its text travels
        return None
    return data if type(copy) is type(error) else None


def decode_exception(data: bytes) -> BaseException | None:
    """Return the exception, or None if its class is not to be had in this process."""
    try:
        error = pickle.loads(data)  # noqa: S301 - bytes of our own local channel only
    except BaseException:  # noqa: BLE001 - as above
        return None
    return error if isinstance(error, BaseException) else None


def immutable(value: object, depth: int = 3) -> bool:
    """Whether a value needs no copy within a process: plain, or a step's message."""
    kind = type(value)
    if kind in _CARRIED:
        return True
    if kind is tuple or kind is frozenset:
        if depth <= 0 or len(value) > _MOST_ITEMS:  # type: ignore[arg-type]
            return False
        for item in value:  # type: ignore[attr-defined]
            if type(item) not in _CARRIED and not immutable(item, depth - 1):
                return False
        return True
    return False


def _immutable_values(kwargs: Mapping[str, Any]) -> bool:
    return all(immutable(value) for value in kwargs.values())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".splitlines()[0][:300]


def _encodable(value: object) -> bool:
    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:  # noqa: BLE001 - a question, not an error
        return False
    return True


def _find_offender(value: object, path: str) -> tuple[str, object]:
    """Follow the parts that fail down to the smallest one; return its path and itself."""
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        seen.add(id(value))
        for child_path, child in _children(value, path):
            if id(child) not in seen and not _encodable(child):
                path, value = child_path, child
                break
        else:
            break
    return path, value


def _children(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item
            yield f"{path}.keys({key!r})", key
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, functools.partial):
        yield from _children(value.args, f"{path}.args")
        yield from _children(value.keywords, f"{path}.keywords")
        yield f"{path}.func", value.func
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value, path)
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif not isinstance(value, type):
        names = list(getattr(value, "__dict__", ()))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        for name in names:
            if name not in ("__weakref__", "__dict__") and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _function_parts(function: types.FunctionType, path: str) -> Iterator[tuple[str, object]]:
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield f"{path}.<closure {name}>", cell.cell_contents
        except ValueError:
            continue  # a name that is not bound yet holds nothing to send
    for name, item in zip(function.__code__.co_varnames, function.__defaults__ or (), strict=False):
        yield f"{path}.<default {name}>", item
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{path}.<global {name}>", function.__globals__[name]
