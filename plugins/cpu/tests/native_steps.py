"""A program over plain numpy memory, without torch: a prompt whole, and cut up beside another."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
from hardpoint_cpu.native import library as native

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, POSITIONS = 24, 4, 2, 6, 40, 50, 64
BLOCKS, BLOCK = 40, 4
THREADS = 3


def require(condition: bool, what: str) -> None:
    """As ``assert``, which `python -O` leaves out."""
    if not condition:
        raise SystemExit(f"wrong: {what}")


def main() -> None:
    draw = np.random.default_rng(0)
    held = []

    def array(*shape):
        held.append(draw.standard_normal(shape).astype(np.float32))
        return held[-1]

    def matrix(rows, cols):
        return native.Matrix(array(rows, cols).ctypes.data, rows, cols, 0)

    keys, values = (array(BLOCKS * BLOCK, KV_HEADS, HEAD).ctypes.data for _ in range(2))
    cos, sin = (array(POSITIONS, HEAD // 2).ctypes.data for _ in range(2))
    embed, norm = matrix(VOCABULARY, HIDDEN), matrix(1, HIDDEN)
    qkv = (HEADS + 2 * KV_HEADS) * HEAD
    ops = [
        native.Op(kind=0, out=0, weight=embed, scale=1),
        native.Op(kind=1, source=0, out=1, weight=norm, eps=1e-5),
        native.Op(kind=2, source=1, out=2, weight=matrix(qkv, HIDDEN)),
        native.Op(kind=5, source=2, out=2, keys=keys, values=values, cos=cos, sin=sin),
        native.Op(kind=6, source=2, out=3, keys=keys, values=values, scale=0.3),
        native.Op(kind=7, source=0, out=5, picked=1),
        native.Op(kind=7, source=3, out=6, picked=1),
        native.Op(kind=3, source=6, out=5, weight=matrix(HIDDEN, HEADS * HEAD), picked=1),
        native.Op(kind=1, source=5, out=1, weight=norm, eps=1e-5, picked=1),
        native.Op(kind=4, source=1, out=4, weight=matrix(2 * INNER, HIDDEN), picked=1),
        native.Op(kind=3, source=4, out=5, weight=matrix(HIDDEN, INNER), picked=1),
        native.Op(kind=2, source=5, out=-1, weight=embed, picked=1),
    ]
    columns = (ctypes.c_int64 * 7)(HIDDEN, HIDDEN, qkv, HEADS * HEAD, INNER, HIDDEN, HEADS * HEAD)
    shape = native.Shape(
        48, 4, VOCABULARY, POSITIONS, BLOCKS, BLOCK, HEADS, KV_HEADS, HEAD, 0, 7, columns
    )
    library = native.load(
        Path(os.environ.get("HARDPOINT_NATIVE_TESTED", native.FOLDER / native.FILE))
    )
    made = library.hp_program_new(
        0, THREADS, (native.Op * len(ops))(*ops), len(ops), ctypes.byref(shape)
    )
    program = ctypes.c_void_p(made)

    def run(rows, *, expected=0):
        """``rows``: (first position, tokens, blocks) of each request; the logits of their last."""
        counts = [len(tokens) for _, tokens, _ in rows]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([np.arange(at, at + len(t)) for at, t, _ in rows])
        table = np.stack([blocks for _, _, blocks in rows]).astype(np.int32)
        row = np.repeat(np.arange(len(rows)), counts)
        slots = table[row, positions // BLOCK] * BLOCK + positions % BLOCK
        ids = np.concatenate([tokens for _, tokens, _ in rows])
        inputs = [np.asarray(each, np.int64) for each in (ids, positions, slots, starts[1:] - 1)]
        logits = np.full((len(rows), VOCABULARY), np.nan, np.float32)
        step = native.Step(
            len(ids), len(rows), len(rows), table.shape[1],
            *(each.ctypes.data for each in inputs), starts.ctypes.data, table.ctypes.data,
            logits.ctypes.data,
        )  # fmt: skip
        require(
            library.hp_program_run(program, ctypes.byref(step), 0, len(ops)) == expected,
            "return value",
        )
        best = np.zeros(len(rows), np.int64)
        library.hp_program_best(
            program, logits.ctypes.data, len(rows), VOCABULARY, best.ctypes.data
        )
        if not expected:
            require(best.tolist() == logits.argmax(-1).tolist(), "best")
        return logits

    prompt, other = draw.integers(0, VOCABULARY, 37), draw.integers(0, VOCABULARY, 9)
    first, second = np.arange(1, 11), np.arange(20, 30)
    whole = run([(0, prompt, first)])[0]
    run([(0, prompt[:20], second), (0, other, first)])
    cut = run([(9, other[:1], first), (20, prompt[20:], second)])[1]
    require(np.array_equal(whole, cut), "cut up")
    require(np.isfinite(whole).all(), "finite")
    run([(0, np.array([VOCABULARY]), first)], expected=5)
    run([(0, np.array([1]), np.full(10, BLOCKS))], expected=7)
    run([(60, draw.integers(0, 9, 5), np.arange(1, 18))], expected=6)
    library.hp_program_free(program)
    print("whole and cut up alike")


if __name__ == "__main__":
    main()
