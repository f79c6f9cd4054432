"""The native library's kernels, called one by one over numpy arrays; and what attention computes,
in numpy.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
from attrs import define
from hardpoint_cpu.native.library import FILE, FOLDER, LEVELS, Matrix

QUERY_TILE = 16
LIBRARY = Path(os.environ.get("HARDPOINT_NATIVE_TESTED", FOLDER / FILE))
"""The library under test: the installed one, unless a test has built another."""


class Attention(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p), ("query_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("type", ctypes.c_int32),
        ("table", ctypes.c_void_p), ("block_size", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("kv_head", ctypes.c_int64), ("group", ctypes.c_int64), ("head", ctypes.c_int64),
        ("position", ctypes.c_int64), ("tokens", ctypes.c_int64), ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class Vector(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32))


def available_levels() -> tuple[str, ...]:
    bits = ctypes.CDLL(str(LIBRARY)).hp_levels() if LIBRARY.is_file() else 0
    return tuple(name for index, name in enumerate(LEVELS) if bits >> index & 1)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut off the low halves: any bfloat16 will do."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def kind_of(array: np.ndarray) -> int:
    return {np.dtype(np.float32): 0, np.dtype(np.uint16): 1}[array.dtype]


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


class Kernels:
    """The kernels of one level."""

    def __init__(self, level: str) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.hp_test_best.restype = ctypes.c_int64
        self.library.hp_test_scratch.restype = ctypes.c_int64
        self.level = ctypes.c_int32(LEVELS.index(level))

    def scratch(self, cols: int, group: int = 1, head: int = 1) -> np.ndarray:
        sizes = (ctypes.c_int64(each) for each in (cols, group, head))
        return np.full(self.library.hp_test_scratch(*sizes), np.nan, np.float32)

    def matrix(self, array: np.ndarray) -> Matrix:
        return Matrix(array.ctypes.data, *array.shape, kind_of(array))

    def vector(self, array: np.ndarray | None) -> Vector:
        return Vector(None, 0) if array is None else Vector(array.ctypes.data, kind_of(array))

    def linear(self, x, weight, bias=None, before=None) -> np.ndarray:
        out = (
            np.full((len(x), len(weight)), np.nan, np.float32) if before is None else before.copy()
        )
        scratch, w = self.scratch(weight.shape[1]), self.matrix(weight)
        self.library.hp_test_linear(
            self.level, address(x), ctypes.c_int64(len(x)), ctypes.byref(w),
            ctypes.byref(self.vector(bias)),
            ctypes.c_int32(before is not None), address(out), address(scratch),
        )  # fmt: skip
        return out

    def gated(self, x, weight, bias=None) -> np.ndarray:
        out = np.full((len(x), len(weight) // 2), np.nan, np.float32)
        scratch, w = self.scratch(weight.shape[1]), self.matrix(weight)
        self.library.hp_test_gated(
            self.level, address(x), ctypes.c_int64(len(x)), ctypes.byref(w),
            ctypes.byref(self.vector(bias)),
            address(out), address(scratch),
        )  # fmt: skip
        return out

    def norm(self, x, weight, eps: float) -> np.ndarray:
        out, w = np.empty_like(x), self.matrix(weight)
        self.library.hp_test_norm(
            self.level, address(x), ctypes.c_int64(len(x)), ctypes.byref(w), ctypes.c_float(eps),
            address(out),
        )  # fmt: skip
        return out

    def rotate(self, x, cos, sin) -> np.ndarray:
        out = x.copy()
        sizes = (ctypes.c_int64(each) for each in x.shape)
        self.library.hp_test_rotate(self.level, address(out), *sizes, address(cos), address(sin))
        return out

    def store(self, x) -> np.ndarray:
        out = np.empty(len(x), np.uint16)
        self.library.hp_test_store(
            self.level, address(x), ctypes.c_int64(len(x)), address(out), ctypes.c_int32(1)
        )
        return out

    def best(self, x) -> int:
        return self.library.hp_test_best(self.level, address(x), ctypes.c_int64(len(x)))

    def attention_case(
        self, draw, kind, *, head, group, block_size, position, tokens, window
    ) -> AttentionCase:
        """A request of position + tokens tokens, in blocks out of order; all else is NaN."""
        kv_heads, end = 2, position + tokens
        blocks = -(-end // block_size)
        table = (draw.permutation(blocks) + 1).astype(np.int32)
        shape = ((blocks + 1) * block_size, kv_heads, head)
        slots = np.repeat(table, block_size)[:end] * block_size + np.arange(end) % block_size
        caches = []
        for _ in range(2):
            whole = np.full(shape, np.nan, np.float32)
            whole[slots] = draw.standard_normal((end, kv_heads, head))
            caches.append(as_bfloat16(whole) if kind == "bfloat16" else whole)
        return AttentionCase(
            self, draw.standard_normal((tokens, 2 * group * head)).astype(np.float32), *caches,
            table, slots, block_size, group, head, position, window,
        )  # fmt: skip


@define
class AttentionCase:
    kernels: Kernels
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray
    slots: np.ndarray
    block_size: int
    group: int
    head: int
    position: int
    window: int
    scale: float = 0.3

    def attended(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """The outputs of the query tokens [first, last), both key heads."""
        query = self.query[first:last].copy()
        out = np.full_like(query, np.nan)
        scratch = self.kernels.scratch(1, self.group, self.head)
        for kv_head in range(2):
            column = kv_head * self.group * self.head * 4
            work = Attention(
                query.ctypes.data + column, query.shape[1], out.ctypes.data + column, out.shape[1],
                self.keys.ctypes.data, self.values.ctypes.data, kind_of(self.keys),
                self.table.ctypes.data, self.block_size, 2, kv_head, self.group, self.head,
                self.position + first, len(query), self.window, self.scale,
            )  # fmt: skip
            self.kernels.library.hp_test_attend(
                self.kernels.level, ctypes.byref(work), address(scratch)
            )
        return out

    def expected(self) -> np.ndarray:
        keys, values = (
            (widened(each) if each.dtype == np.uint16 else each)[self.slots].astype(np.float64)
            for each in (self.keys, self.values)
        )
        out = []
        for token, row in enumerate(self.query.reshape(len(self.query), 2, self.group, self.head)):
            end = self.position + token + 1
            begin = max(0, end - self.window) if self.window else 0
            seen = slice(begin, end)
            scores = np.einsum("hgd,khd->hgk", row.astype(np.float64), keys[seen]) * self.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("hgk,khd->hgd", weights, values[seen]).ravel())
        return np.array(out)
