"""An exception on its way from a worker to the driver, and its rebirth there."""

from __future__ import annotations

import traceback

from attrs import frozen

from hardpoint.errors import HardpointError, RemoteError
from hardpoint.rpc import codec

_LONGEST_CHAIN = 8


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

    @classmethod
    def of(cls, error: BaseException, depth: int = _LONGEST_CHAIN) -> RemoteFailure:
        """Describe ``error``. Called in the worker, for anything that a worker method raised."""
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return cls(
            type_name=qualified_name(type(error)),
            message=_text(error),
            traceback="".join(traceback.format_exception(error)),
            notes=tuple(str(note) for note in getattr(error, "__notes__", ())),
            encoded=codec.encode_exception(error),
            cause=cls.of(cause, depth - 1) if cause is not None and depth > 0 else None,
        )

    def original(self) -> BaseException | None:
        """Rebuild the exception with its chain; None if its class is not to be had here."""
        if self.encoded is None:
            return None
        error = codec.decode_exception(self.encoded)
        if error is not None and self.cause is not None:
            error.__cause__ = self.cause.original()
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
        if isinstance(original, HardpointError):
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


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - another's __str__ may raise anything
        return f"<its __str__ raised {type(broken).__name__}>"
