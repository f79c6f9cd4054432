"""The native library's kernels, called one by one over numpy arrays; and what attention computes,
in numpy.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
from attrs import define
from hardpoint_cpu.native import library, packing
from hardpoint_cpu.native.library import FILE, FOLDER, LEVELS, TYPES, Matrix
from hardpoint_cpu.native.packing import unpack

QUERY_TILE = 16
OWN = ("q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
"""GGUF's types."""
ROUNDING = tuple(f"{kind}_a8" for kind in OWN)
GROUPS = {"w8a8": 64} | dict.fromkeys(("w4a8", *ROUNDING), 32)
"""The columns that share a scale of int8 activations, of the types that are multiplied so."""
LIBRARY = Path(os.environ.get("HARDPOINT_NATIVE_TESTED", FOLDER / FILE))
"""The library under test: the installed one, unless a test has built another."""
if LIBRARY != FOLDER / FILE:
    packing.load = lambda: library.load(LIBRARY)  # type: ignore[assignment]


class Attention(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p), ("query_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p), ("out_stride", ctypes.c_int64),
        ("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("type", ctypes.c_int32),
        ("table", ctypes.c_void_p), ("block_size", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("kv_head", ctypes.c_int64), ("group", ctypes.c_int64), ("head", ctypes.c_int64),
        ("position", ctypes.c_int64), ("tokens", ctypes.c_int64), ("window", ctypes.c_int64),
        ("scale", ctypes.c_float), ("cap", ctypes.c_float),
    )  # fmt: skip


class Vector(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32))


class Best(ctypes.Structure):
    _fields_ = (("value", ctypes.c_float), ("place", ctypes.c_int64), ("wrong", ctypes.c_bool))


def available_levels() -> tuple[str, ...]:
    bits = ctypes.CDLL(str(LIBRARY)).hp_levels() if LIBRARY.is_file() else 0
    return tuple(name for index, name in enumerate(LEVELS) if bits >> index & 1)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut off the low halves: any bfloat16 will do."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << 16).view(np.float32)


def kind_of(array: np.ndarray) -> int:
    kinds = {np.dtype(np.float32): "f32", np.dtype(np.uint16): "bf16", np.dtype(np.int8): "int8"}
    return TYPES[kinds[array.dtype]]


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


@define
class Packed:
    """A packed matrix."""

    data: np.ndarray
    kind: str
    rows: int
    cols: int

    @property
    def numbers(self) -> np.ndarray:
        return unpack(self.data, self.kind, rows=self.rows, cols=self.cols)


class Kernels:
    """The kernels of one level."""

    def __init__(self, level: str, library: Path = LIBRARY) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.hp_test_scratch.restype = ctypes.c_int64
        self.library.hp_test_activation_bytes.restype = ctypes.c_int64
        self.level = ctypes.c_int32(LEVELS.index(level))
        self.bfloat16 = "bf16"  # the type that weights of uint16 have: or bf16_a16

    def scratch(self, cols: int, group: int = 1, head: int = 1) -> np.ndarray:
        sizes = (ctypes.c_int64(each) for each in (cols, group, head))
        return np.full(self.library.hp_test_scratch(*sizes), np.nan, np.float32)

    def matrix(self, weight: np.ndarray | Packed) -> Matrix:
        if isinstance(weight, Packed):
            return Matrix(weight.data.ctypes.data, weight.rows, weight.cols, TYPES[weight.kind])
        kind = TYPES[self.bfloat16] if weight.dtype == np.uint16 else kind_of(weight)
        return Matrix(weight.ctypes.data, *weight.shape, kind)

    def vector(self, array: np.ndarray | None) -> Vector:
        return Vector(None, 0) if array is None else Vector(array.ctypes.data, kind_of(array))

    def activations(self, x: np.ndarray, kind: str) -> np.ndarray:
        """``x`` as it is multiplied with weights of ``kind``: bytes, a row each."""
        number = ctypes.c_int32(TYPES[kind])
        size = self.library.hp_test_activation_bytes(number, ctypes.c_int64(x.shape[1]))
        out = np.empty((len(x), size), np.uint8)
        for row, to in zip(x, out, strict=True):
            self.library.hp_test_prepare(
                self.level, number, address(row), ctypes.c_int64(len(row)), address(to)
            )
        return out

    def _rows(self, x: np.ndarray, weight: np.ndarray | Packed) -> np.ndarray:
        if isinstance(weight, Packed) and weight.kind in GROUPS:
            return self.activations(x, weight.kind)
        if isinstance(weight, np.ndarray) and weight.dtype == np.uint16:
            return self.activations(x, self.bfloat16)
        return x

    def linear(self, x, weight, bias=None, before=None, cap: float = 0.0) -> np.ndarray:
        w, rows = self.matrix(weight), self._rows(x, weight)
        out = np.full((len(x), w.rows), np.nan, np.float32) if before is None else before.copy()
        scratch = self.scratch(w.cols)
        self.library.hp_test_linear(
            self.level, address(rows), ctypes.c_int64(rows.strides[0]), ctypes.c_int64(len(x)),
            ctypes.byref(w), ctypes.byref(self.vector(bias)), ctypes.c_float(cap),
            ctypes.c_int32(before is not None), address(out), address(scratch),
        )  # fmt: skip
        return out

    def gated(self, x, weight, bias=None, activation: int = 0) -> np.ndarray:
        w, rows = self.matrix(weight), self._rows(x, weight)
        out = np.full((len(x), w.rows // 2), np.nan, np.float32)
        scratch = self.scratch(w.cols)
        self.library.hp_test_gated(
            self.level, address(rows), ctypes.c_int64(rows.strides[0]), ctypes.c_int64(len(x)),
            ctypes.byref(w), ctypes.byref(self.vector(bias)), ctypes.c_int32(activation),
            address(out), address(scratch),
        )  # fmt: skip
        return out

    def norm(self, x, weight, eps: float, before=None) -> np.ndarray:
        out = np.full_like(x, np.nan) if before is None else before.copy()
        for row, to in zip(x, out, strict=True):
            self.library.hp_test_norm(
                self.level, address(row), ctypes.byref(self.vector(weight)),
                ctypes.c_int64(len(row)), ctypes.c_float(eps), ctypes.c_int32(before is not None),
                address(to),
            )  # fmt: skip
        return out

    def layer_norm(self, x, weight, bias, eps: float) -> np.ndarray:
        out = np.full_like(x, np.nan)
        for row, to in zip(x, out, strict=True):
            self.library.hp_test_layer_norm(
                self.level, address(row), ctypes.byref(self.vector(weight)),
                ctypes.byref(self.vector(bias)), ctypes.c_int64(len(row)), ctypes.c_float(eps),
                address(to),
            )  # fmt: skip
        return out

    def embed(self, table, row: int, scale: float) -> np.ndarray:
        matrix = self.matrix(table)
        out = np.full(matrix.cols, np.nan, np.float32)
        self.library.hp_test_embed(
            self.level, ctypes.byref(matrix), ctypes.c_int64(row), ctypes.c_float(scale),
            address(out),
        )  # fmt: skip
        return out

    def rotate(self, x, cos, sin) -> np.ndarray:
        out = x.copy()
        sizes = (ctypes.c_int64(each) for each in (*x.shape, 2 * len(cos)))
        self.library.hp_test_rotate(self.level, address(out), *sizes, address(cos), address(sin))
        return out

    def store(self, x, kind: str = "bf16") -> np.ndarray:
        """``x`` [heads, head] as in a cache."""
        heads, head = x.shape
        out = (
            np.zeros((heads, head + 4), np.int8) if kind == "int8" else np.zeros(x.shape, np.uint16)
        )
        sizes = (ctypes.c_int64(each) for each in x.shape)
        self.library.hp_test_store(
            self.level, address(x), *sizes, address(out), ctypes.c_int32(TYPES[kind])
        )
        return out

    def activate(self, x, activation: int) -> np.ndarray:
        out = np.full(len(x) // 2, np.nan, np.float32)
        self.library.hp_test_activate(
            self.level, address(x), ctypes.c_int64(len(out)), ctypes.c_int32(activation),
            address(out),
        )  # fmt: skip
        return out

    def route(self, x, wanted: int, *, normalised: bool) -> tuple[list[int], np.ndarray]:
        out = np.full(2 * wanted, np.nan, np.float32)
        self.library.hp_test_route(
            self.level, address(x), ctypes.c_int64(len(x)), ctypes.c_int64(wanted),
            ctypes.c_int32(normalised), address(out),
        )  # fmt: skip
        return out[:wanted].astype(int).tolist(), out[wanted:]

    def best(self, x) -> int:
        """The place of the greatest; -1 where one is NaN."""
        found = Best(-np.inf, -1, False)
        for start in range(0, len(x), 32):
            part = x[start : start + 32].copy()
            self.library.hp_test_rank(
                self.level, address(part), ctypes.c_int64(len(part)), ctypes.c_int64(start),
                ctypes.byref(found),
            )  # fmt: skip
        return -1 if found.wrong else found.place

    def attention_case(
        self, draw, kind, *, head, group, block_size, position, tokens, window, cap=0.0
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
            if kind == "int8":
                whole = np.stack([self.store(rows, "int8") for rows in whole])
            caches.append(as_bfloat16(whole) if kind == "bfloat16" else whole)
        return AttentionCase(
            self, draw.standard_normal((tokens, 2 * group * head)).astype(np.float32), *caches,
            table, slots, block_size, group, head, position, window, cap,
        )  # fmt: skip


def cached_numbers(stored: np.ndarray) -> np.ndarray:
    """What a cache's bytes stand for, in float64."""
    if stored.dtype == np.uint16:
        return widened(stored).astype(np.float64)
    if stored.dtype == np.int8:
        scales = stored[..., -4:].copy().view(np.float32)
        return stored[..., :-4] * scales.astype(np.float64)
    return stored.astype(np.float64)


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
    cap: float = 0.0
    scale: float = 0.3

    def attended(
        self, first: int = 0, last: int | None = None, *, by_spans: bool = False
    ) -> np.ndarray:
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
                self.position + first, len(query), self.window, self.scale, self.cap,
            )  # fmt: skip
            library, level = self.kernels.library, self.kernels.level
            if by_spans:
                spans = 1 + (self.position + len(self.query)) // 512
                size = spans * len(query) * self.group * (self.head + 2)
                parts = np.full(size, np.nan, np.float32)
                library.hp_test_attend_by_spans(
                    level, ctypes.byref(work), address(parts), address(scratch)
                )
            else:
                library.hp_test_attend(level, ctypes.byref(work), address(scratch))
        return out

    def expected(self) -> np.ndarray:
        keys, values = (cached_numbers(each[self.slots]) for each in (self.keys, self.values))
        out = []
        for token, row in enumerate(self.query.reshape(len(self.query), 2, self.group, self.head)):
            end = self.position + token + 1
            begin = max(0, end - self.window) if self.window else 0
            seen = slice(begin, end)
            scores = np.einsum("hgd,khd->hgk", row.astype(np.float64), keys[seen]) * self.scale
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("hgk,khd->hgd", weights, values[seen]).ravel())
        return np.array(out)
