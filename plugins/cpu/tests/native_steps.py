"""Programs over plain numpy memory, without torch: a prompt whole, and cut up beside another, by
several teams, with every type of weights, experts, and more keys than a span has.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from pathlib import Path

import numpy as np
from hardpoint_cpu.native import library as native
from hardpoint_cpu.native import packing
from hardpoint_cpu.native.library import TYPES

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, POSITIONS = 256, 4, 2, 8, 256, 50, 640
BLOCKS, BLOCK = 330, 4
EXPERTS, TAKEN = 5, 2
QKV = (HEADS + 2 * KV_HEADS) * HEAD
ROUTED, ROUTES, SHARED, GATE = 7, 8, 9, 10
COLUMNS = (
    HIDDEN,
    HIDDEN,
    QKV,
    HEADS * HEAD,
    INNER,
    HIDDEN,
    HEADS * HEAD,
    EXPERTS,
    2 * TAKEN,
    HIDDEN,
    1,
)
PACKED = (
    "f32_panels",
    "bf16_panels",
    "int8",
    "w8a8",
    "w4a8",
    "q8_0",
    "q4_0",
    "q4_1",
    "q4_k",
    "q6_k",
    "q8_0_a8",
    "q4_0_a8",
    "q4_1_a8",
    "q4_k_a8",
    "q6_k_a8",
)
BYTES = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
}

library = native.load(Path(os.environ.get("HARDPOINT_NATIVE_TESTED", native.FOLDER / native.FILE)))
packing.load = lambda: library


def require(condition: bool, what: str) -> None:
    """As ``assert``, which `python -O` leaves out."""
    if not condition:
        raise SystemExit(f"wrong: {what}")


class Model:
    """Two layers, the second with experts, and a program of them for each team."""

    def __init__(self, kind: str, cache: str, level: int) -> None:
        self.draw = np.random.default_rng(0)
        self.kind, self.level, self.cache = kind, level, TYPES[cache]
        self.held: list[np.ndarray] = []
        self.rows: dict[int, np.ndarray] = {}
        self.ops = self._ops({"f32": 4 * HEAD, "bf16": 2 * HEAD, "int8": HEAD + 4}[cache])

    def array(self, *shape: int, scale: float = 0.06) -> np.ndarray:
        self.held.append((self.draw.standard_normal(shape) * scale).astype(np.float32))
        return self.held[-1]

    def plain(self, rows: int, cols: int, scale: float = 0.06) -> native.Matrix:
        array = self.array(rows, cols, scale=scale)
        return native.Matrix(array.ctypes.data, rows, cols, 0)

    def matrix(self, rows: int, cols: int) -> native.Matrix:
        kind = self.kind.removesuffix("_a8")
        if kind == "f32" or (kind in BYTES and cols % BYTES[kind][0]):
            return self.plain(rows, cols)
        if kind in BYTES:
            size, length = BYTES[kind]
            raw = self.draw.integers(0, 256, (rows, cols // size, length), dtype=np.uint8)
            small = {"q6_k": 5e-5, "q4_k": 2e-4, "q8_0": 1e-3}.get(kind, 1e-2)
            scale = np.array([small, small if kind == "q4_k" else -8 * small], np.float16).view(
                np.uint8
            )
            if kind == "q6_k":
                raw[..., -2:] = scale[:2]
            else:
                count = 4 if kind in ("q4_1", "q4_k") else 2
                raw[..., :count] = scale[:count]
            data = packing.pack(raw.reshape(rows, -1), kind, kind, cols=cols)
        else:
            data = packing.pack(self.array(rows, cols), "f32", kind, cols=cols)
        self.held.append(data)
        return native.Matrix(data.ctypes.data, rows, cols, TYPES[self.kind])

    def _ops(self, bytes_of_a_head: int) -> list[native.Op]:
        cos, sin = (self.array(POSITIONS, HEAD // 2, scale=1).ctypes.data for _ in range(2))
        embed = self.plain(VOCABULARY, HIDDEN, 1.0)
        norm = native.Matrix(np.ones(0).ctypes.data, 0, 0, 0)
        ops = [native.Op(kind=0, out=0, weight=embed, scale=1)]
        for layer in range(2):
            caches = [
                np.zeros(BLOCKS * BLOCK * KV_HEADS * bytes_of_a_head, np.uint8) for _ in range(2)
            ]
            self.held += caches
            keys, values = (each.ctypes.data for each in caches)
            norm = self.plain(1, HIDDEN, 1.0)
            ops += [
                native.Op(kind=1, source=0, out=1, weight=norm, eps=1e-5),
                native.Op(kind=2, source=1, out=2, weight=self.matrix(QKV, HIDDEN)),
                native.Op(kind=5, source=2, out=2, keys=keys, values=values, cos=cos, sin=sin),
                native.Op(kind=6, source=2, out=3, keys=keys, values=values, scale=0.3, cap=4.0,
                          window=600 * layer),
            ]  # fmt: skip
            if layer == 0:
                ops += [
                    native.Op(kind=3, source=3, out=0, weight=self.plain(HIDDEN, HEADS * HEAD)),
                    native.Op(kind=1, source=0, out=1, weight=norm, eps=1e-5),
                    native.Op(kind=4, source=1, out=4, weight=self.matrix(2 * INNER, HIDDEN)),
                    native.Op(kind=2, source=4, out=9, weight=self.matrix(HIDDEN, INNER)),
                    native.Op(kind=8, source=9, out=0, weight=norm, eps=1e-5),
                ]
        ops += [
            native.Op(kind=7, source=0, out=5, picked=1),
            native.Op(kind=7, source=3, out=6, picked=1),
            native.Op(kind=3, source=6, out=5, weight=self.plain(HIDDEN, HEADS * HEAD), picked=1),
            native.Op(kind=1, source=5, out=1, weight=norm, eps=1e-5, picked=1),
            *self._experts(),
            native.Op(
                kind=2, source=5, out=-1, weight=self.matrix(VOCABULARY, HIDDEN), picked=1, cap=9.0
            ),
        ]
        return ops

    def _experts(self) -> list[native.Op]:
        router = self.plain(EXPERTS, HIDDEN)
        ups, downs = self.matrix(EXPERTS * 2 * INNER, HIDDEN), self.matrix(EXPERTS * HIDDEN, INNER)
        return [
            native.Op(kind=2, source=1, out=ROUTED, weight=router, picked=1),
            native.Op(kind=11, source=ROUTED, out=ROUTES, columns=EXPERTS, per_token=TAKEN,
                      normalised=1, picked=1),
            native.Op(kind=12, source=1, second=ROUTES, out=5, weight=ups, other=downs,
                      columns=EXPERTS, per_token=TAKEN, activation=1, picked=1),
            native.Op(kind=4, source=1, out=4, weight=self.matrix(2 * INNER, HIDDEN), picked=1),
            native.Op(kind=2, source=4, out=SHARED, weight=self.matrix(HIDDEN, INNER), picked=1),
            native.Op(kind=2, source=1, out=GATE, weight=self.plain(1, HIDDEN), picked=1),
            native.Op(kind=13, source=SHARED, second=GATE, out=5, columns=HIDDEN, picked=1),
        ]  # fmt: skip

    def program(self, threads: int) -> Program:
        return Program(self, threads)


class Program:
    def __init__(self, model: Model, threads: int) -> None:
        self.model = model
        columns = (ctypes.c_int64 * len(COLUMNS))(*COLUMNS)
        shape = native.Shape(
            600, 20, VOCABULARY, POSITIONS, BLOCKS, BLOCK, HEADS, KV_HEADS, HEAD, model.cache,
            len(COLUMNS), columns,
        )  # fmt: skip
        ops = (native.Op * len(model.ops))(*model.ops)
        made = library.hp_program_new(model.level, threads, ops, len(ops), ctypes.byref(shape))
        self.handle, self.count = ctypes.c_void_p(made), len(ops)

    def close(self) -> None:
        library.hp_program_free(self.handle)

    def run(self, rows, *, expected: int = 0, parts: int = 1, picked=None, only_best: bool = False):
        """``rows``: (first position, tokens, blocks) of each request; the logits of their last
        tokens, or of those ``picked``. ``parts``: calls that a step is cut into.
        """
        counts = [len(tokens) for _, tokens, _ in rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(at, at + len(t)) for at, t, _ in rows])
        table = np.stack([blocks for _, _, blocks in rows]).astype(np.int32)
        row = np.repeat(np.arange(len(rows)), counts)
        slots = table[row, positions // BLOCK] * BLOCK + positions % BLOCK
        ids = np.concatenate([tokens for _, tokens, _ in rows])
        wanted = starts[1:] - 1 if picked is None else picked
        inputs = [np.asarray(each, np.int64) for each in (ids, positions, slots, wanted)]
        logits = np.full((len(wanted), VOCABULARY), np.nan, np.float32)
        best = np.full(len(wanted), -7, np.int64)
        step = native.Step(
            len(ids), len(rows), len(wanted), table.shape[1],
            *(each.ctypes.data for each in inputs), starts.ctypes.data, table.ctypes.data,
            None if only_best else logits.ctypes.data, best.ctypes.data,
        )  # fmt: skip
        cuts = np.linspace(0, self.count, parts + 1).astype(int)
        for first, last in itertools.pairwise(cuts.tolist()):
            wrong = library.hp_program_run(self.handle, ctypes.byref(step), first, last)
            require(wrong == expected, "return value")
        if expected or only_best:
            return best
        again = np.zeros(len(wanted), np.int64)
        library.hp_program_best(
            self.handle, logits.ctypes.data, len(wanted), VOCABULARY, again.ctypes.data
        )
        require(best.tolist() == logits.argmax(-1).tolist() == again.tolist(), "best")
        require(bool(np.isfinite(logits).all()), "finite")
        return logits


def alike(kind: str, cache: str, level: int) -> None:
    """A prompt's last tokens have the same logits however it is computed."""
    model = Model(kind, cache, level)
    draw = np.random.default_rng(1)
    prompt, other = draw.integers(0, VOCABULARY, 560), draw.integers(0, VOCABULARY, 9)
    first, second = np.arange(1, 161), np.arange(165, 325)
    whole = None
    for threads in (1, 3):
        program = model.program(threads)
        require(bool(program.handle), "a program")
        last = program.run([(0, prompt, first)], picked=np.arange(545, 560))
        whole = last if whole is None else whole
        what = f"{kind}, {cache} cache, level {level}, {threads} threads"
        require(np.array_equal(whole, last), what)
        program.run([(0, prompt[:20], second), (0, other, first)], parts=3)
        program.run([(20, prompt[20:545], second)])
        got = program.run(
            [(9, other[:1], first), (545, prompt[545:], second)], picked=np.arange(1, 16)
        )
        require(np.array_equal(whole, got), f"cut up, {what}")
        rest = [[(at, prompt[at : at + 1], second)] for at in range(555, 560)]
        for at, rows in enumerate(rest):
            beside = [(9, other[:1], first)] if at % 2 else []
            got = program.run([*beside, *rows], parts=1 + at)[-1]
            require(np.array_equal(whole[10 + at], got), f"token by token, {what}")
            best = program.run([*beside, *rows], only_best=True)
            require(best[-1] == got.argmax(), f"only the best, {what}")
        program.close()


def refused() -> None:
    """Steps beside the memory, and operations beside their buffers."""
    model = Model("f32", "f32", 0)
    program = model.program(2)
    blocks = np.arange(1, 161)
    program.run([(0, np.array([VOCABULARY]), blocks)], expected=5)
    program.run([(0, np.array([1]), np.full(10, BLOCKS))], expected=7)
    program.run([(POSITIONS - 4, np.zeros(5, int), np.arange(1, 162))], expected=6)
    program.close()
    for place, field, value in (
        (2, "out", GATE),
        (2, "source", 99),
        (1, "in_column", 1),
        (5, "out", -1),
    ):
        model = Model("f32", "f32", 0)
        setattr(model.ops[place], field, value)
        require(not model.program(1).handle, f"{field} = {value} of operation {place} was taken")


def main() -> None:
    levels = [level for level in range(3) if library.hp_levels() >> level & 1]
    for level in levels:
        for kind in ("f32", *PACKED):
            alike(kind, "bf16", level)
        for cache in ("f32", "int8"):
            alike("f32", cache, level)
    refused()
    print("whole and cut up alike")


if __name__ == "__main__":
    main()
