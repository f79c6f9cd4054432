"""The step ``kernels`` of ``gpu_check.sh``: each kernel beside its torch operation."""

from __future__ import annotations

import contextlib
import traceback

from gpu_house import so_far


def compare(dry: bool) -> list[str]:
    """Tell the largest difference by kernel; return what is wrong: differences beyond a bound, and
    kernels that raised. Each is tried, whatever became of the one before it. ``dry``: on host
    memory, interpreted (TRITON_INTERPRET is set).
    """
    import torch
    from hardpoint_runtime.attention import paged
    from hardpoint_runtime.attention.builder import AttentionMetadataBuilder
    from hardpoint_runtime.device import HostDeviceOps, TorchDeviceOps
    from hardpoint_runtime.kernels import (
        attention,
        blocks,
        filters,
        kv_write,
        penalties,
        rejection,
        slots,
    )
    from hardpoint_runtime.memory import blocks as plain_blocks
    from hardpoint_runtime.sampling import edits
    from hardpoint_runtime.sampling import filters as plain_filters
    from hardpoint_runtime.sampling import rejection as plain_rejection

    port = HostDeviceOps() if dry else TorchDeviceOps("cuda", 0)
    where = port.device
    torch.manual_seed(0)
    told: dict = {}
    faults: list[str] = []

    @contextlib.contextmanager
    def tried(name):
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the others are to be tried, too
            traceback.print_exc()
            faults.append(f"{name}: {type(error).__name__}: {error}"[:500])
        so_far(told)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape).to(where, dtype)

    def close(name, found, expected, bound):
        gap = (found.double() - expected.double()).abs()
        gap = float(gap.nan_to_num(0.0).max()) if gap.numel() else 0.0
        told[name] = max(gap, told.get(name, 0.0))
        same_shape = found.shape == expected.shape
        if not same_shape or gap > bound or not torch.equal(found.isnan(), expected.isnan()):
            faults.append(f"{name}: {gap} above {bound}, {found.shape} {expected.shape}")

    # Rows: decodes, a whole prompt, a chunk with context; then padding.
    lengths = [(40, 1), (9, 9), (30, 7)] if dry else [(1500, 1), (40, 1), (300, 300), (900, 65)]
    block_size = 16
    heads, kv_heads = (4, 2) if dry else (9, 3)
    for dtype, head in ([(torch.float32, 16)] if dry else [
        (torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 128),
        (torch.bfloat16, 80),
    ]):  # fmt: skip
        starts, positions, table, used = [0], [], [], 1
        for length, queries in lengths:
            starts.append(starts[-1] + queries)
            positions += range(length - queries, length)
            count = -(-length // block_size)
            table.append(list(range(used, used + count)))
            used += count
        cache = [random(used, block_size, kv_heads, head, dtype=dtype) for _ in range(2)]
        rows = [row for row, (_, q) in enumerate(lengths) for _ in range(q)]
        mapped = [
            table[row][p // block_size] * block_size + p % block_size
            for row, p in zip(rows, positions, strict=True)
        ]
        metadata = AttentionMetadataBuilder(port, block_size).build(
            query_start=starts + starts[-1:], seq_lens=[length for length, _ in lengths] + [0],
            block_table=[*table, []], slots=[*mapped, -1], positions=[*positions, 0],
            num_reqs=len(lengths), num_tokens=starts[-1],
        )  # fmt: skip
        with tried("slot_mapping"):
            found = slots.slot_mapping(
                metadata.block_table, metadata.query_start_device, metadata.positions,
                block_size=block_size, max_query=metadata.max_query,
            )  # fmt: skip
            close("slot_mapping", found, metadata.slots, 0)
        tokens = starts[-1] + 1
        query = random(tokens, heads, head, dtype=dtype)
        key, value = (random(tokens, kv_heads, head, dtype=dtype) for _ in range(2))
        ours, theirs = [each.clone() for each in cache], [each.clone() for each in cache]
        paged.kv_write(key, value, *theirs, metadata)
        with tried(f"kv_write {dtype}"):
            kv_write.kv_write(key, value, *ours, metadata)
            for a, b in zip(ours, theirs, strict=True):
                close("kv_write", a, b, 0)
        slopes = torch.tensor([2.0**-n for n in range(1, heads + 1)], device=where)
        bound = 2e-5 if dtype == torch.float32 else 4e-2
        options = (
            {},
            {"window": 20},
            {"softcap": 5.0},
            {"window": 33, "softcap": 5.0, "alibi": slopes},
        )
        for more in options[:: 3 if dry else 1]:
            with tried(f"attention {dtype} {head} {sorted(more)}"):
                a, b = (
                    module.attention(query, *theirs, metadata, scale=head**-0.5, **more)
                    for module in (attention, paged)
                )
                close(f"attention {dtype}", a, b, bound)
        chosen = torch.tensor([1, 2], device=where)
        ours = [each.clone() for each in theirs]
        with tried("blocks"):
            for module, planes in ((plain_blocks, theirs), (blocks, ours)):
                module.copy_blocks(planes, chosen, chosen.flip(0), overlapping=True)
                module.zero_blocks(planes, chosen[:1])
            for a, b in zip(ours, theirs, strict=True):
                close("blocks", a, b, 0)

    vocabulary, rows = (131, 3) if dry else (49152, 16)
    logits = random(rows, vocabulary) * 3
    temperature = torch.linspace(0.5, 1.5, rows, device=where)
    min_p = torch.full((rows,), 0.01, device=where)
    with tried("temper"):
        ours, theirs = (
            function(logits, temperature, min_p)
            for function in (filters.temper, plain_filters.tempered)
        )
        close("temper", ours.nan_to_num(neginf=-1e4), theirs.nan_to_num(neginf=-1e4), 1e-5)
    top_k = torch.tensor([(0, 50, 7)[row % 3] for row in range(rows)], device=where)
    top_p = torch.tensor([(0.9, 1.0, 0.7)[row % 3] for row in range(rows)], device=where)
    scaled = plain_filters.tempered(logits, temperature, None)
    with tried("truncate"):
        ours, theirs = (
            function(scaled, top_k, top_p).isfinite()
            for function in (filters.truncate, plain_filters.truncated)
        )
        told["truncate, tokens on another side"] = count = int((ours != theirs).sum())
        if count > rows:
            faults.append(f"truncate: {count} tokens on another side")
    places = torch.randperm(logits.numel(), device=where)[:1000].sort().values
    values = torch.rand(4, len(places), device=where) + 0.5
    ours, theirs = logits.clone(), logits.clone()
    with tried("penalise"):
        penalties.penalise(ours, places, *values)
        edits.penalise_places(theirs, places, *values)
        close("penalise", ours, theirs, 1e-6)

    counts = [3, 0, 2, 4]
    starts = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32, device=where)
    target, proposed = (random(9, vocabulary).softmax(-1) for _ in range(2))
    drafts = torch.randint(0, vocabulary, (9,), device=where, dtype=torch.int32)
    given = (
        drafts, starts, target, proposed, torch.rand(9, dtype=torch.float64).to(where),
        torch.arange(9, device=where) * 7919, torch.arange(4, device=where), max(counts),
    )  # fmt: skip
    with tried("rejection"):
        ours, theirs = (m.accept_drawn(*given) for m in (rejection, plain_rejection))
        close("rejection", ours, theirs, 0)
    return faults
