"""Static shapes: every step is cut into pieces that fit one, and no request is left out."""

from __future__ import annotations

import random

import pytest
from hardpoint_tpu.buckets import (
    BucketError,
    Buckets,
    Shape,
    covering,
    padded,
    powers,
    token_shape,
)


def test_powers_end_at_the_most():
    assert powers(8, 64) == (8, 16, 32, 64)
    assert powers(16, 100) == (16, 32, 64, 100)
    assert powers(16, 16) == (16,)


def test_sizes_beyond_the_first_that_is_enough_are_left_out():
    assert covering((1, 8, 16, 32), 9) == (1, 8, 16)
    assert covering((32, 8, 8), 32) == (8, 32)
    assert covering((8, 16), 99) == (8, 16)


def test_padding_is_the_least_that_holds_all():
    sizes = (1, 4, 16)
    for size in range(1, 17):
        found = padded(size, sizes, "requests")
        assert found == min(each for each in sizes if each >= size)
    with pytest.raises(BucketError, match="17 requests fit no bucket of 1, 4, 16"):
        padded(17, sizes, "requests")


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(16, Shape(1, 16)), (64, Shape(4, 16)), (256, Shape(16, 16)), (272, Shape(17, 16)),
     (512, Shape(16, 32)), (2048, Shape(16, 128))],
)  # fmt: skip
def test_large_buckets_have_long_tiles(tokens, shape):
    assert token_shape(tokens) == shape
    assert shape.tokens == tokens


@pytest.mark.parametrize("tokens", [0, 15, 100, 528])
def test_a_size_that_cannot_be_cut_is_refused(tokens):
    with pytest.raises(BucketError, match=f"{tokens} tokens"):
        token_shape(tokens)


def test_every_step_is_cut_into_pieces_that_fit():
    draw = random.Random(1)
    buckets = Buckets(rows=(1, 4, 8), tokens=(16, 64, 512))
    for _ in range(2000):
        single = draw.random() < 0.3
        counts = [1 if single else draw.randint(1, 128) for _ in range(draw.randint(1, 20))]
        pieces = buckets.pieces(counts)
        assert [index for _, members in pieces for index in members] == list(range(len(counts)))
        for shape, members in pieces:
            assert shape in buckets.shapes
            tiles = sum(-(-counts[index] // shape.tile) for index in members)
            assert 0 < tiles <= shape.tiles
            assert len(members) <= buckets.sampled_rows(shape) <= 8
            if all(count == 1 for count in counts):
                assert shape.tile == 1


def test_a_piece_takes_the_smallest_bucket():
    buckets = Buckets(rows=(1, 4, 8), tokens=(16, 64, 512))
    assert buckets.pieces([16]) == [(Shape(1, 16), [0])]
    assert buckets.pieces([17, 16]) == [(Shape(4, 16), [0, 1])]
    assert buckets.pieces([1] * 9) == [(Shape(8, 1), list(range(8))), (Shape(1, 1), [8])]
    assert buckets.pieces([512]) == [(Shape(16, 32), [0])]
    assert buckets.pieces([]) == []


def test_more_tokens_of_one_request_than_the_largest_bucket_are_refused():
    with pytest.raises(BucketError, match="513 tokens of one request"):
        Buckets(rows=(1,), tokens=(16, 512)).pieces([513])
