"""How to run an operation into memory that is there already.

torch's functional operations allocate what they return. Most have an ``out`` variant, found here
by its schema; where there is none the operation runs as it is and its result is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from hardpoint_runtime.graphs.torch_operations import is_operation, schema_of, tensors_in

OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that say what is allocated: given by the memory itself in an ``out`` variant."""

COPIES = frozenset({"aten::_to_copy", "aten::clone"})
"""Operations that do nothing but copy their first argument, converting it."""

ALLOCATIONS = frozenset(
    {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
    | {"aten::new_empty_strided"}
)
"""Operations whose result has no values yet."""


@frozen(eq=False)
class Work:
    """One call that a replay makes. It writes into memory that it is given and returns nothing of
    use.
    """

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def into(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Sequence[torch.Tensor | None],
) -> Work | None:
    """Return the work that computes ``function(*args, **kwargs)`` into ``results``, its tensors in
    order; None among them: not needed. Returns None if there is nothing to do.
    """
    if is_operation(function):
        name = schema_of(function).name
        if name in ALLOCATIONS:
            return None
        if name in COPIES:
            return Work(torch.ops.aten.copy_.default, (results[0], args[0]), {})
        variant = out_variant(function)
        if variant is not None and all(result is not None for result in results):
            outs = dict(zip(variant.outs, results, strict=True))
            given = {name: kwargs[name] for name in kwargs if name not in variant.dropped}
            return Work(variant.function, args[: variant.positional], {**given, **outs})
    return Work(_computed, (function, tuple(args), dict(kwargs), tuple(results)), {})


@frozen(kw_only=True)
class OutVariant:
    """An operation that writes into its arguments ``outs`` what another returns. It has no
    arguments ``dropped``, and takes ``positional`` of them by position at most.
    """

    function: Any
    outs: tuple[str, ...]
    dropped: frozenset[str]
    positional: int


@functools.cache
def out_variant(function: Any) -> OutVariant | None:
    """Return the variant of a functional operation (an ``OpOverload``) that writes into given
    memory; None if torch has none.
    """
    schema = schema_of(function)
    if schema.is_mutable:
        return None
    wanted = [(arg.name, str(arg.type)) for arg in schema.arguments]
    for name in function.overloadpacket.overloads():
        candidate = getattr(function.overloadpacket, name)
        arguments = schema_of(candidate).arguments
        outs = tuple(arg.name for arg in arguments if arg.is_out)
        inputs = [(arg.name, str(arg.type)) for arg in arguments if not arg.is_out]
        dropped = {each for each in wanted if each[0] in OPTIONS} - set(inputs)
        if len(outs) == len(schema.returns) and inputs == [w for w in wanted if w not in dropped]:
            return OutVariant(
                function=candidate,
                outs=outs,
                dropped=frozenset(name for name, _ in dropped),
                positional=sum(not arg.kwarg_only for arg in arguments if not arg.is_out),
            )
    return None


def _computed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Sequence[torch.Tensor | None],
) -> None:
    """Run ``function`` and copy what is needed of its tensors."""
    for kept, each in zip(results, tensors_in(function(*args, **kwargs)), strict=True):
        if kept is not None:
            kept.copy_(each)
