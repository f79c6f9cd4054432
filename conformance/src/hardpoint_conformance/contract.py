"""What a test of the kit says when a plugin does not keep to the contract."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from hardpoint.errors import RemoteError
from hardpoint.records import shown


class ContractError(AssertionError):
    """A plugin does otherwise than the contract says. The message has four parts: what the contract
    says, what was seen, where it is written, what to do.
    """


def expect(condition: object, says: str, *, seen: object, where: object, do: str) -> None:
    """Raise ContractError unless ``condition`` holds.

    ``says`` is the rule in one sentence, ``seen`` what was found (a text is shown as it is),
    ``where`` the contract's own class, method or module (its docstring is the rule's source), and
    ``do`` the way out for the plugin's author.
    """
    if not condition:
        violated(says, seen=seen, where=where, do=do)


def expect_equal(seen: object, wanted: object, says: str, *, where: object, do: str) -> None:
    """Raise ContractError unless ``seen == wanted``; both are shown."""
    if seen != wanted:
        violated(says, seen=f"{shown(seen)}, not {shown(wanted)}", where=where, do=do)


def violated(says: str, *, seen: object, where: object, do: str) -> NoReturn:
    """Raise ContractError."""
    text = seen if isinstance(seen, str) else shown(seen)
    raise ContractError(
        f"\n  the contract says:  {says}"
        f"\n  seen:               {text}"
        f"\n  where it stands:    {written(where)}"
        f"\n  what to do:         {do}"
    )


def expect_raises(
    kinds: type[BaseException] | tuple[type[BaseException], ...],
    action: Callable[[], Any],
    says: str,
    *,
    where: object,
    do: str,
) -> BaseException:
    """Run ``action`` and return what it raised, which must be of ``kinds``; an error of a worker
    (RemoteError) counts as the exception that was brought over, which is then returned.
    """
    try:
        value = action()
    except RemoteError as error:
        cause = error.__cause__
        if isinstance(error, kinds):
            return error
        if isinstance(cause, kinds):
            return cause
        violated(says, seen=f"it raised {error.type_name}: {error}", where=where, do=do)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        if isinstance(error, kinds):
            return error
        violated(says, seen=f"it raised {type(error).__name__}: {error}", where=where, do=do)
    violated(says, seen=f"it returned {shown(value)}", where=where, do=do)


def written(where: object) -> str:
    """Return the name of a part of the contract and the beginning of its docstring."""
    if isinstance(where, str):
        return where
    name = getattr(where, "__qualname__", "") or getattr(where, "__name__", repr(where))
    module = getattr(where, "__module__", "")
    full = f"{module}.{name}" if module else name
    text = " ".join((inspect.getdoc(where) or "").split("\n\n")[0].split())
    return f"{full}: {textwrap.shorten(text, 200)}" if text else full
