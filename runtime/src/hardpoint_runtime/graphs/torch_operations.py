"""What the recorder needs of torch's dispatcher and of storage, for which torch has no public name
(torch 2.13; https://github.com/pytorch/pytorch keeps the same names since 2.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

Storage = int
"""A piece of memory, whatever views there are of it. Two pieces alive never share a number."""


def storage_of(tensor: torch.Tensor) -> Storage:
    """Return the memory that ``tensor`` is a view of."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - also of tensors without data


def leaves(tree: Any) -> Iterator[Any]:
    """Give what nested tuples, lists and dictionaries hold, in order."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        yield from leaves(tuple(tree.values()))
    else:
        yield tree


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_operation(function: Any) -> bool:
    """Whether ``function`` is an operation of torch's dispatcher."""
    return isinstance(function, OpOverload)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return operation._schema  # noqa: SLF001


def run_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operations that ``operation`` is composed of and return its result; NotImplemented
    if it is one itself, on any device or on that of its tensors.
    """
    name = operation.name()
    if not _has_kernel(name, DispatchKey.CompositeImplicitAutograd):
        return NotImplemented
    for tensor in tensors_in(args):
        if _has_kernel(name, torch._C._dispatch_key_for_device(tensor.device.type)):  # noqa: SLF001
            return NotImplemented
    return operation._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # noqa: SLF001


def _has_kernel(name: str, key: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))  # noqa: SLF001
