"""An exception on its way from a worker to the driver, and its rebirth there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar

from attrs import frozen

from hardpoint.errors import HardpointError, RemoteError
from hardpoint.isolation import LONGEST_TEXT, clipped, text_of, traceback_of
from hardpoint.rpc import codec

_R = TypeVar("_R")

_LONGEST_CHAIN = 8
_LARGEST_BODY = 16 * LONGEST_TEXT
"""Bytes of an encoded exception; of a larger one only the text travels."""


@frozen(kw_only=True)
class RemoteFailure:
    """An exception as it travels.

    ``type_name`` is qualified, ``traceback`` is the remote text, ``notes`` are its ``__notes__``,
    ``encoded`` is the exception itself if it could be encoded, ``cause`` is what it was raised
    from (or while handling).
    """

    type_name: str
    message: str
    traceback: str
    notes: tuple[str, ...] = ()
    encoded: bytes | None = None
    cause: RemoteFailure | None = None
    consequence: bool = False
    """As HardpointError.consequence."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        depth: int = _LONGEST_CHAIN,
        encode: Callable[[BaseException], bytes | None] = codec.encode_exception,
    ) -> RemoteFailure:
        """Describe ``error``. Called in the worker, for anything that a worker method raised.

        Never raises, whatever the exception's own code does; texts are clipped. ``encode`` is that
        of the channel's codec.
        """
        troubles: list[str] = []
        notes = _tried(lambda: _notes(getattr(error, "__notes__", ())), troubles) or ()
        encoded = encode(error)
        if encoded is not None and len(encoded) > _LARGEST_BODY:
            troubles.append(f"{len(encoded)} bytes of it are too many to send: only its text is")
            encoded = None
        cause = None
        if depth > 0 and (before := _tried(lambda: _before(error), troubles)) is not None:
            cause = cls.of(before, depth - 1, encode)
        return cls(
            type_name=qualified_name(type(error)),
            message=text_of(error),
            traceback=traceback_of(error),
            notes=(*notes, *troubles),
            encoded=encoded,
            cause=cause,
            consequence=_is_own(error) and error.consequence is True,
        )

    def original(self) -> BaseException | None:
        """Rebuild the exception with its chain; None if its class is not to be had here.

        Of Hardpoint's own errors the text is enough, if nothing more could travel.
        """
        error: BaseException | None
        if self.encoded is None:
            error = _own_error(self.type_name, self.message)
        else:
            error = codec.decode_exception(self.encoded)
        if error is not None and self.cause is not None:
            try:
                error.__cause__ = self.cause.original()
            except BaseException:  # noqa: BLE001 - a class of its own mind; it goes without
                return error
        return error

    def raised_by(self, rank: int, method: str) -> RemoteError:
        """Build the error that the caller sees, with the original exception as ``__cause__``.

        The message is one paragraph; the remote traceback and notes are notes of the error. It has
        the exit code of the original.
        """
        error = RemoteError(
            f"worker rank {rank} raised {self.type_name} in {method!r}: {self.message}",
            rank=rank,
            type_name=self.type_name,
            remote_traceback=self.traceback,
        )
        error.__cause__ = original = self.original()
        error.consequence = self.consequence
        if _is_own(original):
            error.exit_code = original.exit_code
        for note in self.notes:
            error.add_note(note)
        error.add_note(f"--- traceback on rank {rank} ---\n{self.traceback.rstrip()}")
        return error


def qualified_name(kind: type) -> str:
    """Return ``module.Class``; built-in exceptions by their bare name."""
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _is_own(error: object) -> TypeGuard[HardpointError]:
    """Whether it is one of Hardpoint's; isinstance() would ask the exception's own code, too."""
    return issubclass(type(error), HardpointError)


def _own_error(type_name: str, message: str) -> HardpointError | None:
    """Return an error of Hardpoint's by its name and text, if its class is loaded here."""
    kinds = [HardpointError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        if kind.__module__.startswith("hardpoint.") and qualified_name(kind) == type_name:
            error = kind.__new__(kind, message)
            error.args = (message,)
            return error
    return None


def _tried(read: Callable[[], _R], troubles: list[str]) -> _R | None:
    """Return ``read()``, or None and a trouble more: an exception's own code may raise anything."""
    try:
        return read()
    except BaseException as broken:  # noqa: BLE001 - told in the failure's notes
        troubles.append(f"it cannot be told in full: its own code raised {type(broken).__name__}")
        return None


def _before(error: BaseException) -> BaseException | None:
    """Return what ``error`` was raised from, or while handling."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return before if isinstance(before, BaseException) else None


def _notes(notes: Iterable[object]) -> tuple[str, ...]:
    """Return the notes as texts, of no more than LONGEST_TEXT together."""
    told: list[str] = []
    left = LONGEST_TEXT
    for note in notes:
        if left <= 0:
            told.append("more notes are cut here")
            break
        told.append(clipped(str(note)))
        left -= len(told[-1]) + 1
    return tuple(told)
