"""Arguments of the Executor's services, checked before they are sent, or before a worker acts."""

from __future__ import annotations

import inspect
import math
from string import Formatter
from typing import TYPE_CHECKING, Any, NoReturn

from hardpoint.errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from hardpoint.config.schema import ParallelConfig
    from hardpoint.worker import Worker

_FIELDS = ("rank", "part", "tp", "pp")


def check_profile(prefix: str | None, delay_iterations: int, max_iterations: int | None) -> None:
    """Raise InvalidRequestError for a prefix that is no file name or a count that is none."""
    if prefix is not None and (not prefix or "/" in prefix or "\0" in prefix or prefix[0] == "."):
        _refuse("prefix", prefix, "must be the beginning of a file name, without folders")
    if not _is_count(delay_iterations, 0):
        _refuse("delay_iterations", delay_iterations, "must be a number of steps, at least 0")
    if max_iterations is not None and not _is_count(max_iterations, 1):
        _refuse("max_iterations", max_iterations, "must be a number of steps, at least 1, or None")


def profile_arguments(
    worker_class: type[Worker],
    prefix: str | None,
    delay_iterations: int,
    max_iterations: int | None,
) -> dict[str, Any]:
    """Return the arguments of ``profile`` that were not left at their defaults. Raises
    UnsupportedError for one that ``worker_class`` does not take. Called in the worker before it is
    told to start: all ranks have one class, so that none begins alone.
    """
    given = {
        "prefix": prefix,
        "delay_iterations": delay_iterations or None,
        "max_iterations": max_iterations,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    parameters = inspect.signature(worker_class.profile).parameters
    for name, value in wanted.items():
        if name not in parameters:
            raise UnsupportedError(
                f"{name} = {value!r} of profile",
                f"worker {worker_class.__module__}.{worker_class.__qualname__}",
                hint="Leave it out.",
            )
    return wanted


def check_pattern(pattern: str | None, parallel: ParallelConfig, num_workers: int) -> None:
    """Raise InvalidRequestError for a pattern of file names with unknown fields, or without one
    that tells the files of two workers or parts apart.

    ``tp`` and ``pp`` tell workers apart where there is one for each place of both axes; where a
    worker owns several devices, only ``rank`` does.
    """
    if pattern is None:
        return
    try:
        names = {name for _, name, _, _ in Formatter().parse(pattern) if name is not None}
    except ValueError as error:
        _refuse("pattern", pattern, f"is malformed ({error})")
    if unknown := sorted(names - set(_FIELDS)):
        _refuse("pattern", pattern, f"has unknown fields {unknown}; known: {', '.join(_FIELDS)}")
    needed = {"part"}
    if "rank" not in names and num_workers > 1:
        axes = {"tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size}
        by_place = math.prod(axes.values()) == num_workers
        needed |= {axis for axis in axes if axes[axis] > 1} if by_place else {"rank"}
    if missing := sorted(needed - names):
        _refuse("pattern", pattern, f"lacks {missing}: several files would have one name")
    if "/" in pattern or "\0" in pattern:
        _refuse("pattern", pattern, "must be a file name, without folders")


def check_max_size(max_size: int | None) -> None:
    """Raise InvalidRequestError unless ``max_size`` is None or a number of bytes."""
    if max_size is not None and not _is_count(max_size, 1):
        _refuse("max_size", max_size, "must be a number of bytes, at least 1, or None")


def _is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _refuse(field: str, value: object, must: str) -> NoReturn:
    raise InvalidRequestError(f"{field} = {value!r} {must}", field=field, value=value)
