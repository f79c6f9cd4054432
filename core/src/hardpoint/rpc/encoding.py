"""How values become bytes and back: the seam between channels and codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from hardpoint.errors import EncodingError, UnsupportedError
from hardpoint.rpc import codec
from hardpoint.rpc.codec import Carried, Encoded, Parcel
from hardpoint.rpc.failures import RemoteFailure

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.registry import Registry
    from hardpoint.rpc.calls import Call, Reply

_PLAIN = codec.PLAIN
_dumps_plain, _VERSION = codec.dumps_plain, codec.PLAIN_VERSION

Buffer = bytes | memoryview
Pieces = tuple[Buffer, Sequence[memoryview]]
"""Data, and buffers that travel apart."""


class Codec(ABC):
    """Encodes what a channel carries. Any thread; nothing but :meth:`learn` changes it."""

    name: ClassVar[str]
    bare: ClassVar[bool] = False
    """Whether bytes of its own are a parcel already."""
    callables: ClassVar[bool] = True
    """Whether functions travel, and a worker runs those that it is sent."""
    refused_by: ClassVar[str] = ""
    """What keeps others from travelling, as errors name it."""

    @abstractmethod
    def encode(self, value: object, where: str) -> Encoded:
        """Encode a value; raise EncodingError naming the path to what cannot be."""

    def encode_call(self, call: Call) -> Pieces:
        """Encode what a call carries: (method, args, kwargs). Raises EncodingError."""
        try:
            return self.encode((call.method, call.args, call.kwargs), "the call")
        except EncodingError as error:
            parts = ((f"method of {call.name!r}", call.method), ("args", call.args))
            for where, part in (*parts, ("kwargs", call.kwargs)):
                self.encode(part, where)
            raise EncodingError(f"the call of {call.name!r} cannot be sent: {error}") from error

    def plain_arguments(self, args: tuple[Any, ...]) -> bytes | None:
        """Encode the arguments of a call by name the shortest way, if there is one for them; None
        if there is not.
        """
        return None

    def plain(self, value: object) -> bytes | None:
        """Encode a value the shortest way, if there is one for it; None if there is not."""
        return None

    @abstractmethod
    def parcel(self, data: Buffer, buffers: Sequence[memoryview]) -> Parcel:
        """Return what arrived, as a parcel to be unpacked by whoever uses it."""

    @abstractmethod
    def decode(self, data: Buffer, where: str) -> Any:
        """Decode one piece of bytes at once; raise EncodingError."""

    @abstractmethod
    def encode_exception(self, error: BaseException) -> bytes | None:
        """Encode an exception so that it can be raised again; None if only its text travels."""

    def learn(self, registry: Registry) -> None:  # noqa: B027 - a default, not a slot
        """Take in the ``messages`` of the plugins in use, where a codec must know beforehand what
        travels. Called once, when they are loaded. Raises UnresolvedReferenceError or
        WrongClassError.
        """

    # Within one process, for executors whose workers are threads.

    @abstractmethod
    def pack(self, value: object, where: str) -> Parcel:
        """Prepare a value: by reference if it is immutable, else as a copy that is encoded."""

    def pack_call(self, call: Call) -> Parcel:
        """Prepare what a call carries: (method, args, kwargs)."""
        body = (call.method, call.args, call.kwargs)
        if isinstance(call.method, str) and not call.kwargs and codec.immutable(call.args):
            return Carried(body)
        data, buffers = self.encode_call(call)
        return self.parcel(data, buffers)


class PickleCodec(Codec):
    """Anything at all, for this host's own workers (``rpc.pickle = "local"``)."""

    name: ClassVar[str] = "pickle"
    bare: ClassVar[bool] = True

    def encode(self, value: object, where: str) -> Encoded:
        """Encode a value, functions included; large buffers are set aside, uncopied."""
        return codec.encode_apart(value, where)

    def plain(self, value: object) -> bytes | None:
        """Encode a number, a text and the like."""
        kind = type(value)
        if kind not in _PLAIN or (kind is bytes and len(value) >= codec.LARGE_BYTES):  # type: ignore[arg-type]
            return None
        return _dumps_plain(value, _VERSION)

    def plain_arguments(self, args: tuple[Any, ...]) -> bytes | None:
        """Encode numbers, texts and the like, which most arguments are."""
        for value in args:
            kind = type(value)
            if kind not in _PLAIN or (kind is bytes and len(value) >= codec.LARGE_BYTES):
                return None
        return _dumps_plain(args, _VERSION)

    def encode_call(self, call: Call) -> Pieces:
        """Encode a call; large bytes among its arguments are set aside like other buffers."""
        if any(map(codec.is_large, (*call.args, *call.kwargs.values()))):
            args = tuple(map(codec.set_apart, call.args))
            kwargs = {name: codec.set_apart(value) for name, value in call.kwargs.items()}
            call = evolve(call, args=args, kwargs=kwargs)
        return super().encode_call(call)

    def parcel(self, data: Buffer, buffers: Sequence[memoryview]) -> Parcel:
        """Wrap what :meth:`encode` made."""
        return Encoded(data, buffers) if buffers or type(data) is not bytes else data

    def decode(self, data: Buffer, where: str) -> Any:
        """Decode what :meth:`encode` made."""
        return codec.decode(data, where)

    def encode_exception(self, error: BaseException) -> bytes | None:
        """Encode an exception, if its copy is one of the same type."""
        return codec.encode_exception(error)

    def pack(self, value: object, where: str) -> Parcel:
        """Prepare a value for a worker of this process."""
        return codec.pack(value, where)

    def pack_call(self, call: Call) -> Parcel:
        """Prepare what a call carries."""
        return codec.pack_arguments(call.method, call.args, call.kwargs, call.name)


def encoded_value(codec: Codec, reply: Reply) -> Encoded | None:
    """Return what a worker's end sends for the value in a reply; None for None. Raises
    EncodingError.
    """
    parcel = reply.value
    if reply.of:
        return codec.encode(parcel, f"result of {reply.of!r}")
    if type(parcel) is Carried:
        value, of = parcel.value, parcel.of
        where = f"result of {of!r}" if of else "value"
        return None if value is None else codec.encode(value, where)
    if parcel is None or type(parcel) is Encoded:
        return parcel
    if type(parcel) is bytes:
        return Encoded(parcel)
    raise EncodingError(f"a parcel of {type(parcel).__name__} is not for this channel")


def received(codec: Codec, data: Buffer) -> RemoteFailure:
    """Return the failure that a worker's end sent; one that cannot be read is a failure too."""
    try:
        found = codec.decode(data, "a worker's failure")
    except EncodingError as error:
        return RemoteFailure.of(error, encode=codec.encode_exception)
    if isinstance(found, RemoteFailure):
        return found
    return RemoteFailure(type_name="unknown", message=f"{found!r:.200}", traceback="")


def codec_of(config: Config, registry: Registry | None = None) -> Codec:
    """Return the codec that ``rpc.pickle`` asks for, which knows the messages of the plugins in use
    in ``registry``.
    """
    made = codec_named("typed" if config.rpc.pickle == "never" else "pickle")
    if registry is not None:
        made.learn(registry)
    return made


def codec_named(name: str) -> Codec:
    """Return the codec of that name; called in workers, which are told it. Raises
    UnsupportedError.
    """
    if name == PickleCodec.name:
        return PickleCodec()
    if name in ("typed", "across"):
        from hardpoint.rpc.typed_codec import AcrossCodec, TypedCodec

        return TypedCodec() if name == TypedCodec.name else AcrossCodec()
    raise UnsupportedError(f"the codec {name!r}", "this core")
