"""bfloat16 in Triton's interpreter as devices compute it.

The interpreter keeps bfloat16 as integers, multiplies matrices of them as such, and cuts digits off
where devices round to the nearest: Triton's makers do not support the type there yet
(triton-lang/triton#11584). Here both steps are made with torch's own conversions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def numbers(handle: Any) -> np.ndarray[Any, Any]:
    """Return the values of a tensor of the interpreter: float32 of those in bfloat16."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    bits = np.ascontiguousarray(handle.data).view(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bits of float32 ``values`` in the nearest bfloat16."""
    nearest = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
    return nearest.view(torch.int16).numpy().view(np.uint16)


def mended(monkeypatch: Any) -> None:
    """Have the interpreter multiply and round bfloat16 while ``monkeypatch`` lasts."""
    builder = interpreter.InterpreterBuilder
    multiply, cast = builder.create_dot, builder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(numbers(each), tl.float32)
            if each.dtype.scalar == tl.bfloat16
            else each
            for each in (a, b)
        )
        return multiply(self, a, b, *more)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            bits = rounded(source.data).reshape(source.data.shape)
            return interpreter.TensorHandle(bits, tl.bfloat16)
        return cast(self, source, kind)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
