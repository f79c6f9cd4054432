"""One piece's inputs against a brute-force reading of the requests, and where tokens are cached."""

from __future__ import annotations

import random

import numpy as np
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_tpu.attention import cache_slots, token_positions
from hardpoint_tpu.buckets import Buckets
from hardpoint_tpu.inputs import build_piece
from hardpoint_tpu.requests import Requests

BLOCK = 4
BUCKETS = Buckets(rows=(1, 4, 16), tokens=(16, 64, 512))


def known_requests(draw: random.Random, count: int) -> tuple[Requests, dict[str, int]]:
    """Requests with some of their tokens computed, and how many of the rest to compute now."""
    requests = Requests(capacity=16, max_model_len=128, block_size=BLOCK, width=32, num_blocks=4000)
    counts, fresh = {}, []
    for index in range(count):
        length = draw.randint(2, 100)
        computed = draw.randint(0, length - 1)
        counts[f"r{index}"] = draw.randint(1, length - computed)
        fresh.append(
            NewRequestData(
                req_id=f"r{index}",
                prompt=tuple(draw.randrange(1, 97) for _ in range(length)),
                block_ids=(tuple(draw.sample(range(1, 4000), -(-length // BLOCK))),),
                num_computed=computed,
                sampling=SamplingParams(temperature=0),
            )
        )
    requests.apply(
        SchedulerOutput(
            step_id=1, new=tuple(fresh), num_tokens=counts, total_tokens=sum(counts.values())
        )
    )
    return requests, counts


def test_a_piece_holds_every_token_at_its_position():
    draw = random.Random(3)
    for _ in range(25):
        requests, counts = known_requests(draw, draw.randint(1, 12))
        if draw.random() < 0.3:
            counts = dict.fromkeys(counts, 1)
        names, numbers = list(counts), list(counts.values())
        for shape, members in BUCKETS.pieces(numbers):
            ids, part = [names[i] for i in members], [numbers[i] for i in members]
            rows = BUCKETS.sampled_rows(shape)
            piece = build_piece(requests, shape, ids, part, rows)
            positions, real = map(
                np.asarray, token_positions(piece.starts, piece.counts, shape.tile)
            )
            found = [
                (tile, int(positions[tile, place]))
                for tile in range(shape.tiles)
                for place in range(shape.tile)
                if real[tile, place]
            ]
            wanted, due, tile = [], [], 0
            for req_id, count in zip(ids, part, strict=True):
                slot = requests[req_id].slot
                computed = int(requests.columns["num_computed"][slot])
                for offset in range(count):
                    wanted.append((tile + offset // shape.tile, computed + offset))
                    place = (tile * shape.tile) + offset
                    token = requests.tokens[slot, computed + offset]
                    assert piece.token_ids[place] == token
                last = tile * shape.tile + count - 1
                if computed + count == len(requests.known(req_id)):
                    due.append((req_id, last))
                assert (piece.tables[tile] == requests.blocks[slot]).all()
                tile += -(-count // shape.tile)
            assert found == wanted
            assert piece.sampled == tuple(each[0] for each in due)
            assert piece.rows.tolist() == [each[1] for each in due] + [0] * (rows - len(due))
            assert not piece.counts[tile:].any()
            assert not piece.token_ids[~real.reshape(-1)].any()


def test_the_slot_of_a_token_is_block_times_size_plus_the_rest():
    rng = np.random.default_rng(5)
    for block_size in (1, 4, 16):
        tables = rng.integers(1, 900, (5, 40 // block_size + 1)).astype(np.int32)
        starts = rng.integers(0, 30, 5).astype(np.int32)
        counts = rng.integers(0, 9, 5).astype(np.int32)
        slots = np.asarray(cache_slots(tables, starts, counts, 8, block_size)).reshape(5, 8)
        for tile in range(5):
            for place in range(8):
                position = starts[tile] + place
                wanted = 0
                if place < counts[tile]:
                    block = tables[tile, position // block_size]
                    wanted = block * block_size + position % block_size
                assert slots[tile, place] == wanted
