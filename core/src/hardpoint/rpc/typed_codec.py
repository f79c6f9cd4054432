"""The codec of ``rpc.pickle = "never"``: msgpack of plain data and of records known beforehand.

Nothing that it reads names a class to import or code to run: a name that is not in the table is
refused. Not for speed: nested tuples and records are packed each on its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import msgpack  # type: ignore[import-untyped]
from attrs import frozen

from hardpoint.errors import EncodingError, UnsupportedError
from hardpoint.isolation import text_of
from hardpoint.references import WrongClassError, resolve
from hardpoint.rpc import codec
from hardpoint.rpc.encoding import Buffer, Codec
from hardpoint.rpc.failures import RemoteFailure

if TYPE_CHECKING:
    from hardpoint.registry import Registry

MODULES = (
    "hardpoint.adapters",
    "hardpoint.capabilities",
    "hardpoint.checkpoints.description",
    "hardpoint.config.schema",
    "hardpoint.kv_cache",
    "hardpoint.messages",
    "hardpoint.metadata",
    "hardpoint.pooling_params",
    "hardpoint.records",
    "hardpoint.rpc.failures",
    "hardpoint.rpc.worker_process",
    "hardpoint.sampling_params",
    "hardpoint.sleep",
)
"""Their records and enumerations travel."""

_TUPLE, _SET, _FROZENSET, _COMPLEX, _INT, _RECORD, _ENUM, _PATH, _MAPPING = range(1, 10)
_SEQUENCES: Mapping[type[Any], int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_DEEPEST = 40
"""Tuples, records and such within each other: each takes some 40 KiB of the C stack, too."""


class UntypedError(UnsupportedError, EncodingError):
    """A value of a type that does not travel to another host, or under ``rpc.pickle = "never"``;
    names the path to it.

    What to do: send plain data or a registered record (``messages`` of the plugin's record); on one
    host ``rpc.pickle = "local"`` lets everything travel.
    """


class TypedCodec(Codec):
    """Plain data (numbers, text, bytes, lists, tuples, sets, mappings, paths) and known records.

    Records are known by name: Hardpoint's own, and those of plugins that it was taught. A bytearray
    or a memoryview arrives as bytes, a subclass of a plain type not at all.
    """

    name: ClassVar[str] = "typed"
    callables: ClassVar[bool] = False
    refused_by: ClassVar[str] = 'rpc.pickle = "never"'
    reason: ClassVar[str] = "only plain data and records of plugins travel then"
    hint: ClassVar[str] = 'Send plain data, or set rpc.pickle = "local".'

    def __init__(self) -> None:
        self._classes = {_name(kind): kind for kind in _own_classes()}

    def learn(self, registry: Registry) -> None:
        """Know the messages that the platform and the extensions in use declare."""
        plugins = (*registry.used("platform"), *registry.used("extension"))
        references = [each for plugin in plugins for each in plugin.record.messages]
        kinds = [_checked(reference) for reference in references]
        self._classes = self._classes | {_name(kind): kind for kind in kinds}

    def encode(self, value: object, where: str) -> codec.Encoded:
        """Encode a value; raise UntypedError for what is not known."""
        try:
            return codec.Encoded(self._pack(value))
        except UntypedError as error:
            raise self._refusal(*self._offender(value, where)) from error
        except Exception as error:
            raise EncodingError(
                f"{where} cannot be sent between driver and worker: {type(error).__name__}: "
                f"{text_of(error)}"
            ) from error

    def parcel(self, data: Buffer, buffers: Sequence[memoryview]) -> codec.Parcel:
        """Wrap what :meth:`encode` made."""
        return _Parcel(self, data)

    def decode(self, data: Buffer, where: str) -> Any:
        """Decode what :meth:`encode` made; raise EncodingError for anything else."""
        try:
            return self._unpack(data)
        except BaseException as error:
            raise EncodingError(
                f"{where} was sent but cannot be rebuilt here ({type(error).__name__}: "
                f"{text_of(error)})"
            ) from error

    def encode_exception(self, error: BaseException) -> bytes | None:
        """Return None: of exceptions only the text travels."""
        return None

    def pack(self, value: object, where: str) -> codec.Parcel:
        """Prepare a value for a worker of this process: by reference if immutable."""
        return codec.Carried(value) if codec.immutable(value) else self._parcel_of(value, where)

    def _parcel_of(self, value: object, where: str) -> codec.Parcel:
        return _Parcel(self, self.encode(value, where).data)

    # Both ways.

    def _pack(self, value: object, depth: int = 0) -> bytes:
        packer = msgpack.Packer(
            default=partial(self._extended, _deeper(depth)),
            strict_types=True,
            unicode_errors="surrogatepass",
        )
        packed: bytes = packer.pack(value)
        return packed

    def _unpack(self, data: Buffer, depth: int = 0) -> Any:
        return msgpack.unpackb(
            data,
            ext_hook=partial(self._rebuilt, _deeper(depth)),
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def _extended(self, depth: int, value: Any) -> msgpack.ExtType:
        """Return what msgpack has no form of its own for, as an extension of it."""
        kind = type(value)
        if kind is int:  # of more than 64 bits
            return msgpack.ExtType(_INT, hex(value).encode())
        if isinstance(value, PurePath):
            return msgpack.ExtType(_PATH, str(value).encode("utf-8", "surrogateescape"))
        code, inner = self._taken_apart(kind, value)
        return msgpack.ExtType(code, self._pack(inner, depth))

    def _taken_apart(self, kind: type[Any], value: Any) -> tuple[int, object]:
        if kind in _SEQUENCES:
            return _SEQUENCES[kind], list(value)
        if kind is complex:
            return _COMPLEX, [value.real, value.imag]
        if self._known(kind):
            if isinstance(value, Enum):
                return _ENUM, [_name(kind), value.name]
            return _RECORD, [_name(kind), *_contents(value)]
        if isinstance(value, Mapping) and not isinstance(value, dict):
            return _MAPPING, dict(value)
        raise UntypedError(f"a {kind.__qualname__}", "the typed codec")

    def _rebuilt(self, depth: int, code: int, data: bytes) -> Any:
        """Return the value of an extension."""
        if code == _INT:
            return int(data, 16)
        if code == _PATH:
            return Path(data.decode("utf-8", "surrogateescape"))
        inner = self._unpack(data, depth)
        for kind, its_code in _SEQUENCES.items():
            if code == its_code:
                return kind(inner)
        if code == _COMPLEX:
            return complex(*inner)
        if code == _MAPPING:
            return dict(inner)
        if code in (_RECORD, _ENUM):
            return self._record(code, *inner)
        raise EncodingError(f"a value of the unknown kind {code}")

    def _record(self, code: int, name: object, *contents: object) -> object:
        kind = self._classes.get(name) if isinstance(name, str) else None
        if kind is None or (code == _ENUM) != issubclass(kind, Enum):
            raise EncodingError(f"{name!r} is no record that travels")
        return kind[str(contents[0])] if issubclass(kind, Enum) else _rebuild(kind, contents)

    def _offender(self, value: object, path: str, depth: int = 0) -> tuple[str, object]:
        """Return the path to the first value that does not travel, and itself."""
        if depth < _DEEPEST:
            for child_path, child in self._children(value, path):
                if not self._travels(child):
                    return self._offender(child, child_path, depth + 1)
        return path, value

    def _travels(self, value: object) -> bool:
        try:
            self._pack(value)
        except UntypedError:
            return False
        except Exception:  # noqa: BLE001 - it fails otherwise: not what is looked for
            return True
        return True

    def _children(self, value: object, path: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield f"{path}[{key!r}]", item
                yield f"{path}.keys({key!r})", key
        elif isinstance(value, list | tuple | set | frozenset):
            for index, item in enumerate(value):
                yield f"{path}[{index}]", item
        elif self._known(type(value)) and attrs.has(type(value)):
            for attribute in attrs.fields(type(value)):  # type: ignore[arg-type]
                yield f"{path}.{attribute.name}", getattr(value, attribute.name)

    def _known(self, kind: type[Any]) -> bool:
        return self._classes.get(_name(kind)) is kind

    def _refusal(self, path: str, offender: object) -> UntypedError:
        kind = type(offender)
        what = "a callable" if callable(offender) else f"a {kind.__module__}.{kind.__qualname__}"
        return UntypedError(f"{what} ({path})", self.refused_by, reason=self.reason, hint=self.hint)


class AcrossCodec(TypedCodec):
    """That of whatever crosses hosts, where no configuration lets more travel."""

    name: ClassVar[str] = "across"
    refused_by: ClassVar[str] = "the way to another host"
    reason: ClassVar[str] = "only plain data and records of plugins travel there"
    hint: ClassVar[str] = (
        "Send plain data, and call workers by a method's name: plugins add methods by the hook "
        "hardpoint_worker_methods."
    )


@frozen
class _Parcel:
    """Bytes that this codec alone opens."""

    codec: TypedCodec
    data: Buffer

    def unpack(self, where: str, of: str) -> Any:
        return self.codec.decode(self.data, f"{where} of {of!r}" if of else where)


def _checked(reference: str) -> type:
    kind = resolve(reference)
    if not isinstance(kind, type) or not (attrs.has(kind) or issubclass(kind, Enum)):
        raise WrongClassError(
            f"{reference!r} is no attrs class and no enumeration: it cannot travel"
        )
    return kind


def _own_classes() -> Iterator[type]:
    for name in MODULES:
        module: ModuleType = importlib.import_module(name)
        for kind in vars(module).values():
            own = isinstance(kind, type) and kind.__module__ == name
            if own and (attrs.has(kind) or issubclass(kind, Enum)):
                yield kind


def _deeper(depth: int) -> int:
    if depth >= _DEEPEST:
        raise EncodingError(f"more than {_DEEPEST} levels of nesting")
    return depth + 1


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _contents(value: object) -> list[object]:
    """Return a record's fields, in the order of its constructor."""
    if isinstance(value, RemoteFailure) and value.encoded is not None:
        value = attrs.evolve(value, encoded=None)
    fields: Sequence[attrs.Attribute[Any]] = attrs.fields(type(value))  # type: ignore[arg-type]
    return [getattr(value, field.name) for field in fields if field.init]


def _rebuild(kind: type, contents: Sequence[object]) -> object:
    names = [field.alias for field in attrs.fields(kind) if field.init]
    if len(names) != len(contents):
        raise EncodingError(f"{_name(kind)} has {len(names)} fields, {len(contents)} came")
    value = kind(**dict(zip(names, contents, strict=True)))
    if isinstance(value, RemoteFailure) and value.encoded is not None:
        raise EncodingError("a failure came with an encoded exception, which is not opened here")
    return value
