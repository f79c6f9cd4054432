"""Python's collector of cycles, kept from looking at what a command builds once.

Importing a library and loading a model make some hundred thousand objects that stay. The collector
would look at them again and again while they are made, for about a tenth of a second and more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def late_collection() -> Iterator[Callable[[], None]]:
    """Have nothing collected in the block until the function that is given is called, and then only
    what was made after that; afterwards all is as it was. Does nothing where the collector is off,
    or somebody else uses what is frozen.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield _nothing
        return
    gc.disable()
    try:
        yield _collect_from_here
    finally:
        gc.unfreeze()
        gc.enable()


def _collect_from_here() -> None:
    gc.freeze()
    gc.enable()


def _nothing() -> None:
    pass
