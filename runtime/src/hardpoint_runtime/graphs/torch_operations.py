"""What the recorder needs of torch's dispatcher and of storage, for which torch has no public name
(torch 2.13; https://github.com/pytorch/pytorch keeps the same names since 2.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

Storage = int
"""A piece of memory, whatever views there are of it. Two pieces alive never share a number."""


def storage_of(tensor: torch.Tensor) -> Storage:
    """Return the memory that ``tensor`` is a view of."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - also of tensors without data


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dictionaries, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def is_operation(function: Any) -> bool:
    """Whether ``function`` is an operation of torch's dispatcher."""
    return isinstance(function, OpOverload)


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return operation._schema  # noqa: SLF001
