"""What a capture refuses, by name: work that would not be the same at a replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.torch_operations import schema_of, tensors_in

HOST_METHODS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})
"""Methods of tensors that read host memory without an operation."""

INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
"""Operations whose work depends on data if an index is a mask."""

MOVES = frozenset({"aten::_to_copy", "aten::copy_"})
"""Operations that may cross between the host and a device."""

CHANCES = frozenset({"dropout_p", "p"})
"""Arguments that say how much is left to chance; without any, an operation draws always."""


def check(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise GraphCaptureError if the operation ``func`` (an ``OpOverload``) cannot be recorded with
    these arguments.
    """
    name, tags = schema_of(func).name, func.tags
    if torch.Tag.data_dependent_output in tags:
        _refuse(f"the host reads a tensor ({func})", "Keep it on the device")
    if name == "aten::lift_fresh":
        _refuse(
            "values of the host become a tensor, which would never change again",
            "Make it before, or write it into a static buffer",
        )
    if torch.Tag.dynamic_output_shape in tags or name in INDEXING:
        _check_shape(func, name, args, kwargs)
    if torch.Tag.inplace_view in tags:
        _refuse(f"a tensor changes its shape in place ({func})", "Make a view instead")
    if torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs):
        _refuse(f"random numbers are drawn ({func})", "Draw outside, keyed by request")
    if name in MOVES:
        _check_move(func, name, args, kwargs)


def check_method(name: str) -> None:
    """Raise GraphCaptureError if the tensor method ``name`` reads on the host."""
    if name in HOST_METHODS:
        _refuse(f"the host reads a tensor (Tensor.{name})", "Keep it on the device")


def _check_shape(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name in INDEXING:
        masks = (torch.bool, torch.uint8)
        if not any(t.dtype in masks for t in tensors_in(args[1])):
            return
    elif kwargs.get("output_size") is not None:
        return
    _refuse(
        f"the shape of a result depends on data ({func})", "Compute all rows and select by a mask"
    )


def _check_move(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name == "aten::copy_":
        target, source = args[0].device, args[1].device
    else:
        source = args[0].device
        target = torch.device(kwargs.get("device") or source)
    if source.type == target.type:
        return
    if target.type == "cpu":
        _refuse(f"the host reads a tensor ({func})", "Keep it on the device")
    _refuse(
        f"values of the host are copied to {target} ({func}), which would never change again",
        "Write them into a static buffer before",
    )


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    arguments = schema_of(func).arguments
    found = [index for index, argument in enumerate(arguments) if argument.name in CHANCES]
    for index in found:
        argument = arguments[index]
        value = kwargs.get(
            argument.name, args[index] if index < len(args) else argument.default_value
        )
        if value:
            return True
    return not found


def _refuse(what: str, way_out: str) -> NoReturn:
    raise GraphCaptureError(f"a capture cannot record that {what}. {way_out}")
