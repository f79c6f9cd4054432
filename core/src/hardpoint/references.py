"""References: classes and functions named by text, resolved when used, so that naming stays light.

Two spellings: ``"package.module:Class.attribute"`` and the dotted ``"package.module.Class"``.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from hardpoint.errors import PluginError, PluginLoadError
from hardpoint.isolation import place_of, prints_diverted, text_of

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class UnresolvedReferenceError(PluginLoadError, ImportError):
    """A reference leads nowhere; the message has the whole reference and the part that failed.

    What to do: correct the part that the message names: the module or the attribute.
    """


class WrongClassError(PluginError, TypeError):
    """A reference leads to something that is not the class that is needed.

    What to do: correct the reference in the plugin's record or in the configuration.
    """


def is_reference(text: str) -> bool:
    """Whether ``text`` is spelt as a reference rather than as a plugin's name."""
    return ":" in text or "." in text


def resolve(reference: str) -> Any:
    """Import what ``reference`` names and return it.

    Raises UnresolvedReferenceError (an ImportError too) naming the reference; the original
    exception, if a module raised one, is ``__cause__``.
    """
    module_name, attributes = _split(reference)
    try:
        with prints_diverted():
            found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UnresolvedReferenceError(
            f"reference {reference!r} cannot be resolved: importing {module_name!r} raised "
            f"{type(error).__name__}: {text_of(error)}{place_of(error)}"
        ) from error
    for attribute in attributes:
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise UnresolvedReferenceError(
                f"reference {reference!r} cannot be resolved: module {module_name!r} has no "
                f"{'.'.join(attributes)!r}"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module's own __getattr__ may import, and fail
            raise UnresolvedReferenceError(
                f"reference {reference!r} cannot be resolved: looking up {attribute!r} raised "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
    return found


def resolve_class(reference: str, contract: type[object]) -> type[Any]:
    """Import the class that ``reference`` names; it must be a subclass of ``contract``.

    Raises UnresolvedReferenceError, or WrongClassError (a TypeError too).
    """
    return checked_class(resolve(reference), contract, f"reference {reference!r}")


def checked_class(found: object, contract: type[object], origin: str) -> type[Any]:
    """Return ``found`` if it is a complete subclass of ``contract``, else raise WrongClassError."""
    if isinstance(found, type) and issubclass(found, contract):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise WrongClassError(f"{origin} is {found!r}, which lacks {', '.join(missing)}")
        return found
    raise WrongClassError(
        f"{origin} is {found!r}, which is not a subclass of "
        f"{contract.__module__}.{contract.__qualname__}"
    )


def _split(reference: str) -> tuple[str, list[str]]:
    module, colon, attribute = reference.partition(":")
    if not colon:
        module, _, attribute = reference.rpartition(".")
    if not (_DOTTED.fullmatch(module) and _DOTTED.fullmatch(attribute)):
        raise UnresolvedReferenceError(
            f"reference {reference!r} is malformed; write 'package.module:Class' or "
            "'package.module.Class'"
        )
    return module, attribute.split(".")
