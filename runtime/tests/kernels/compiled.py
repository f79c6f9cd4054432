"""Every kernel as it is launched, compiled for devices that are not here: its spills and memory."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
import triton
from attrs import frozen
from hardpoint_runtime.kernels import (
    blocks,
    filters,
    kv_write,
    paged_decode,
    paged_prefill,
    penalties,
    rejection,
    slots,
)
from hardpoint_runtime.kernels.launches import EXACT, FUSED, width
from hardpoint_runtime.kernels.tiles import keys_at_once, part_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KIB = 1024
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KIB),
    "gfx90a": (GPUTarget("hip", "gfx90a", 64), 64 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), 64 * KIB),
}
"""Devices, and the shared memory that one program may have there."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_INTEGERS = {
    "num_rows", "num_tokens", "table_stride", "block_words", "key_token", "key_head", "value_token",
    "value_head", "window", "query_token", "query_head", "num_parts", "part", "num_places",
    "vocabulary", "logits_row", "scaled_row", "out_row",
}  # fmt: skip
STRIDES = {"key_token", "key_head", "value_token", "value_head", "query_token", "query_head"}
"""Multiples of 16, as launches find them where head sizes are."""


@frozen(kw_only=True)
class Case:
    """One kernel with its constants. ``types`` are of its pointers, for those not in OTHERS."""

    kernel: object
    constants: Mapping[str, object]
    types: Mapping[str, str]
    options: Mapping[str, object]


@frozen(kw_only=True)
class Report:
    """Bytes of shared memory; what is put into memory for lack of registers, in registers or bytes;
    scalars that are put into a vector register for lack of their own; the code's size.
    """

    shared: int
    spills: tuple[int, ...]
    scalars: int
    code_bytes: int


def attention_case(which, dtype, head, group=4, block_size=16, *, extras=True, cache=None):
    module = {"decode": paged_decode, "prefill": paged_prefill}[which]
    pointer, kind, places = f"*{dtype}", DTYPES[dtype], width(head, 16)
    types = dict.fromkeys(("query", "out"), pointer)
    types |= dict.fromkeys(("key_cache", "value_cache"), f"*{cache or dtype}")
    types |= dict.fromkeys(("table", "query_start", "seq_lens"), "*i32")
    types |= dict.fromkeys(("slopes", "parts", "weights"), "*fp32") | {"softcap": "fp32"}
    constants = {
        "BLOCK_SIZE": block_size, "KV_HEADS": 8, "GROUP": group, "HEAD": head, "HEAD_V": head,
        "HEAD_PLACES": places, "HEAD_V_PLACES": places, "HEAD_PART": part_of(kind, places),
        "KEYS": keys_at_once(kind, places), "CAPPED": extras, "SLOPED": extras,
    }  # fmt: skip
    if which == "decode":
        constants |= {"QUERIES": width(group, 16), "PARTED": extras}
        warps = paged_decode.warps(kind, places)
        kernel = module.paged_decode_kernel
    else:
        constants |= {"QUERIES": paged_prefill.queries_at_once(kind, group, places)}
        warps = paged_prefill.warps(kind, places)
        kernel = module.paged_prefill_kernel
    return Case(
        kernel=kernel, constants=constants, types={**types, "scale": "fp32"},
        options={"num_warps": warps, "num_stages": 1, **FUSED},
    )  # fmt: skip


def join_case(dtype):
    return Case(
        kernel=paged_decode.join_parts_kernel,
        constants={"HEADS": 32, "HEAD_V": 128, "HEAD_V_PLACES": 128},
        types={"parts": "*fp32", "weights": "*fp32", "query_start": "*i32", "seq_lens": "*i32",
               "out": f"*{dtype}"},
        options={"num_warps": 1, **FUSED},
    )  # fmt: skip


def kv_write_case(dtype, cache):
    return Case(
        kernel=kv_write.kv_write_kernel,
        constants={"KEYS": 1024, "VALUES": 1024, "HEAD": 128, "HEAD_V": 128, "NUMBERS": 1024},
        types={"key": f"*{dtype}", "value": f"*{dtype}", "key_cache": f"*{cache}",
               "value_cache": f"*{cache}", "slots": "*i64"},
        options=EXACT,
    )  # fmt: skip


CASES = {
    "slot mapping": Case(
        kernel=slots.slot_mapping_kernel,
        constants={"BLOCK_SIZE": 16, "SIZE": 3, "RANK": 1, "INTERLEAVE": 2, "TOKENS": slots.TOKENS},
        types={"table": "*i32", "query_start": "*i32", "positions": "*i64", "slots": "*i64"},
        options=EXACT,
    ),
    "kv write": kv_write_case("bf16", "bf16"),
    "zero blocks": Case(
        kernel=blocks.zero_blocks_kernel,
        constants={"WORD": 32, "WORDS": blocks.WORDS},
        types={"planes": "*i64", "blocks": "*i64"},
        options=EXACT,
    ),
    "copy blocks": Case(
        kernel=blocks.copy_blocks_kernel,
        constants={"WORD": 32, "WORDS": blocks.WORDS},
        types=dict.fromkeys(("sources", "targets", "source_blocks", "target_blocks"), "*i64"),
        options=EXACT,
    ),
    "decode bf16 64": attention_case("decode", "bf16", 64, 3),
    "prefill bf16 128": attention_case("prefill", "bf16", 128),
    "join parts": join_case("bf16"),
    "penalties": Case(
        kernel=penalties.penalise_kernel,
        constants={"PLACES": penalties.PLACES},
        types={"logits": "*fp32", "places": "*i64"}
        | dict.fromkeys(("repetition", "frequency", "presence", "counts"), "*fp32"),
        options=EXACT,
    ),
    "temper": Case(
        kernel=filters.temper_kernel,
        constants={"TEMPERED": True, "MIN_P": True, "TOKENS": filters.TOKENS},
        types=dict.fromkeys(("logits", "temperature", "min_p", "scaled"), "*fp32"),
        options=filters.OPTIONS,
    ),
    "truncate": Case(
        kernel=filters.truncate_kernel,
        constants={"TOKENS": filters.TOKENS},
        types={"scaled": "*fp32", "top_k": "*i64", "top_p": "*fp32", "kept": "*fp32"},
        options=filters.OPTIONS,
    ),
    "recover": Case(
        kernel=rejection.recover_kernel,
        constants={"WITH_PROPOSED": True, "TOKENS": rejection.TOKENS},
        types={"drafts": "*i32", "target": "*fp32", "proposed": "*fp32", "keys": "*i64",
               "recovered": "*i64"},
        options=EXACT,
    ),
    "accept": Case(
        kernel=rejection.accept_kernel,
        constants={"GREEDY": False, "WITH_PROPOSED": True, "PLACES": 8},
        types={"drafts": "*i32", "starts": "*i32", "target": "*fp32", "proposed": "*fp32",
               "shares": "*fp64", "otherwise": "*i64", "bonus": "*i64", "out": "*i32"},
        options={"num_warps": 1, **EXACT},
    ),
}  # fmt: skip
SIZES = (
    (128, 8, 32, False), (256, 2, 16, True), (64, 3, 16, True), (80, 1, 8, False), (96, 7, 8, True),
    (128, 4, 128, True), (256, 8, 16, False),
)  # fmt: skip
"""A head's, query heads of a key head, a block's; whether with a soft cap and slopes, in parts."""
MORE_CASES = {
    **{
        f"{which} {dtype} {head} {group} {block_size} {'all' if extras else 'plain'}":
        attention_case(which, dtype, head, group, block_size, extras=extras)
        for which in ("decode", "prefill")
        for dtype, sizes in (("fp32", SIZES), ("bf16", SIZES), ("fp16", SIZES[:2]))
        for head, group, block_size, extras in sizes
    },
    **{
        f"{which} {dtype} {cache} 256": attention_case(which, dtype, 256, cache=cache)
        for which in ("decode", "prefill")
        for dtype, cache in (("fp32", "bf16"), ("bf16", "fp32"))
    },
    **{f"kv write {a} {b}": kv_write_case(a, b) for a in DTYPES for b in DTYPES},
    **{f"join parts {dtype}": join_case(dtype) for dtype in DTYPES},
    "zero odd blocks": Case(
        kernel=blocks.zero_blocks_kernel, constants={"WORD": 8, "WORDS": blocks.WORDS},
        types={"planes": "*i64", "blocks": "*i64"}, options=EXACT,
    ),
    "accept greedy": Case(
        kernel=rejection.accept_kernel,
        constants={"GREEDY": True, "WITH_PROPOSED": False, "PLACES": 128},
        types=dict(CASES["accept"].types), options={"num_warps": 1, **EXACT},
    ),
}  # fmt: skip


def compile_case(case: Case, target_name: str) -> Report:
    """Compile as a launch with aligned tensors would; no device is asked."""
    target, _ = TARGETS[target_name]
    kernel = case.kernel
    signature = {}
    for name in kernel.arg_names:
        if name in case.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = case.types.get(name) or ("i32" if name in SMALL_INTEGERS else None)
    missing = [name for name, kind in signature.items() if kind is None]
    assert not missing, missing
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in case.constants.items()},
        attrs={
            (place,): aligned
            for place, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or name in STRIDES
        },
    )
    compiled = triton.compile(source, target=target, options=dict(case.options))
    spills, scalars = _spills(compiled.asm, target, case.options)
    return Report(
        shared=compiled.metadata.shared,
        spills=spills,
        scalars=scalars,
        code_bytes=len(compiled.asm.get("cubin") or compiled.asm["hsaco"]),
    )


def _spills(asm, target, options) -> tuple[tuple[int, ...], int]:
    if "amdgcn" in asm:
        pattern = r"\.(private_segment_fixed_size|sgpr_spill_count|vgpr_spill_count): *(\d+)"
        counts = {name: int(number) for name, number in re.findall(pattern, asm["amdgcn"])}
        in_memory = counts["private_segment_fixed_size"], counts["vgpr_spill_count"]
        return in_memory, counts["sgpr_spill_count"]
    from triton.backends.nvidia.compiler import get_ptxas

    name = re.search(r"\.target (\w+)", asm["ptx"]).group(1)
    products = [] if options["enable_fp_fusion"] else ["--fmad=false"]
    done = subprocess.run(
        [str(getattr(get_ptxas(target.arch), "path", "")), "-v", *products, f"--gpu-name={name}",
         "-o", "/dev/null", "/dev/stdin"],
        input=asm["ptx"], capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    stack, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack|spill)", done.stderr))
    return (stack, stores, loads), 0


def cached_at(folder: Path):
    """Have compilations kept in ``folder``, as long as the returned context lasts."""
    from triton import knobs

    scope = knobs.cache.scope()
    return _Cache(scope, folder)


class _Cache:
    def __init__(self, scope, folder):
        self._scope, self._folder = scope, folder

    def __enter__(self):
        from triton import knobs

        self._scope.__enter__()
        knobs.cache.dir = str(self._folder)

    def __exit__(self, *error):
        self._scope.__exit__(*error)
