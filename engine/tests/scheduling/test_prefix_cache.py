"""Names of blocks: what is equal, what differs, and what the cache gives back."""

from __future__ import annotations

import pytest
from hardpoint.adapters import LoRARequest
from hardpoint_engine.scheduling.block_pool import BlockPool
from hardpoint_engine.scheduling.prefix_cache import PrefixCache, chain_root, extend_chain


def names(root, tokens, size=4):
    result = []
    extend_chain(result, root, tokens, size, len(tokens) // size)
    return result


def test_a_name_covers_everything_before_it():
    root = chain_root(["m"])
    first = names(root, [1, 2, 3, 4, 5, 6, 7, 8])
    assert names(root, [1, 2, 3, 4, 5, 6, 7, 9])[0] == first[0]
    assert names(root, [1, 2, 3, 4, 5, 6, 7, 9])[1] != first[1]
    other = names(root, [0, 2, 3, 4, 5, 6, 7, 8])
    assert not set(other) & set(first)
    assert names(root, [258, 2, 3, 4]) != names(root, [2, 258, 3, 4])


def test_extending_later_gives_the_same_names():
    root = chain_root(["m"])
    tokens = list(range(16))
    grown = []
    for count in range(5):
        extend_chain(grown, root, tokens, 4, count)
        assert len(grown) == count
    assert grown == names(root, tokens)


def test_roots_cannot_be_confused():
    roots = [
        chain_root(parts)
        for parts in (["ab", ""], ["a", "b"], ["", "ab"], ["ab"], [1, 0], [0, 1], ["ab", 0])
    ]
    assert len(set(roots)) == len(roots)


def test_match_stops_at_the_first_gap_and_holds_nothing():
    pool = BlockPool(10)
    cache = PrefixCache(pool)
    blocks = pool.allocate(3)
    for name, block in zip([b"a", b"b", b"d"], blocks, strict=True):
        cache.store(name, block)
    assert cache.match([b"a", b"b", b"c", b"d"]) == blocks[:2]
    assert cache.match([b"c", b"a"]) == []
    assert set(pool.references.values()) == {1}


def test_the_first_block_of_a_name_counts():
    pool = BlockPool(10)
    cache = PrefixCache(pool)
    first, second = pool.allocate(2)
    cache.store(b"a", first)
    cache.store(b"a", second)
    assert cache.match([b"a"]) == [first]
    pool.release([second])
    assert pool.allocate(1) == [second], "the unnamed twin is worthless and goes first"
    assert len(cache) == 1


def test_the_least_recently_freed_goes_first_and_is_forgotten():
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    blocks = pool.allocate(3)
    for name, block in zip([b"a", b"b", b"c"], blocks, strict=True):
        cache.store(name, block)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    pool.share([blocks[1]])
    pool.release([blocks[1]])
    assert pool.allocate(2) == [blocks[0], blocks[2]]
    assert cache.match([b"a"]) == cache.match([b"c"]) == []
    assert cache.match([b"b"]) == [blocks[1]]


def test_clear_forgets_and_loses_no_block():
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    kept, held = pool.allocate(2)
    cache.store(b"a", kept)
    cache.store(b"b", held)
    pool.release([kept])
    cache.clear()
    assert cache.match([b"a"]) == cache.match([b"b"]) == []
    pool.release([held])
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]


PROMPT = tuple(range(1, 14))


def test_a_repeated_prompt_computes_only_what_is_not_full(fakes):
    driver = fakes.Driver()
    driver.add("a", PROMPT)
    driver.run()
    driver.add("b", PROMPT)
    driver.run()
    assert driver.tokens["a"] == driver.tokens["b"] == fakes.answer(PROMPT, 8)
    assert driver.ends["a"].metrics.num_cached_tokens == 0
    assert driver.ends["b"].metrics.num_cached_tokens == 12
    stats = driver.scheduler.blocks.prefix.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (26, 12)
    assert driver.worker.computed_tokens == 20 + 8
    driver.check_idle()


def test_the_last_token_of_a_prompt_is_always_computed(fakes):
    driver = fakes.Driver()
    for req_id in ("a", "b"):
        driver.add(req_id, PROMPT[:12], max_tokens=1)
        driver.run()
    assert driver.ends["b"].metrics.num_cached_tokens == 8
    assert driver.tokens["b"] == fakes.answer(PROMPT[:12], 1)


def test_a_conversation_finds_its_own_answers(fakes):
    driver = fakes.Driver()
    driver.add("a", PROMPT)
    driver.run()
    longer = PROMPT + driver.tokens["a"] + (7, 8, 9)
    driver.add("b", longer)
    driver.run()
    assert driver.ends["b"].metrics.num_cached_tokens == 20
    assert driver.tokens["b"] == fakes.answer(longer, 8)


def test_running_requests_share_blocks(fakes):
    driver = fakes.Driver()
    driver.add("a", PROMPT, max_tokens=30)
    driver.step()
    driver.add("b", PROMPT, max_tokens=30)
    driver.step()
    shared = [b for b, n in driver.scheduler.blocks.pool.references.items() if n == 2]
    assert len(shared) == 3
    driver.run()
    assert driver.tokens["a"] == driver.tokens["b"]
    driver.check_idle()


@pytest.mark.parametrize(
    "options",
    [
        {"cache_salt": "mine"},
        {"lora": LoRARequest(id=1, name="n", path="p", digest="d")},
        {"prompt_logprobs": 1},
    ],
)
def test_other_contents_are_not_reused(fakes, options):
    driver = fakes.Driver()
    driver.add("a", PROMPT)
    driver.run()
    driver.add("b", PROMPT, **options)
    driver.run()
    assert driver.ends["b"].metrics.num_cached_tokens == 0
    driver.add("c", PROMPT)
    driver.run()
    assert driver.ends["c"].metrics.num_cached_tokens == 12


def test_adapters_differ_by_content_not_by_name(fakes):
    driver = fakes.Driver()
    for req_id, digest, cached in (("a", "x", 0), ("b", "y", 0), ("c", "x", 12)):
        driver.add(req_id, PROMPT, lora=LoRARequest(id=1, name=req_id, path="p", digest=digest))
        driver.run()
        assert driver.ends[req_id].metrics.num_cached_tokens == cached


def test_a_new_weight_epoch_finds_nothing_old(fakes):
    driver = fakes.Driver()
    driver.add("a", PROMPT)
    driver.add("b", PROMPT[:9], max_tokens=40)
    for _ in range(10):
        driver.step()
    driver.scheduler.blocks.weight_epoch += 1
    driver.run()  # b goes on with old contents, and must not name any for the new weights
    driver.add("c", PROMPT[:9] + fakes.answer(PROMPT[:9], 39), max_tokens=1)
    driver.run()
    assert driver.ends["c"].metrics.num_cached_tokens == 0
    driver.add("d", PROMPT[:9] + fakes.answer(PROMPT[:9], 39), max_tokens=1)
    driver.run()
    assert driver.ends["d"].metrics.num_cached_tokens == 44


def test_of_an_ended_request_the_beginning_is_kept_longest(fakes):
    driver = fakes.Driver(num_blocks=9)
    driver.add("a", PROMPT, max_tokens=7)  # 19 tokens in the cache: 4 named blocks of 5
    driver.run()
    driver.add("other", tuple(range(60, 82)), max_tokens=2)  # 6 blocks: 2 of a's go
    driver.run()
    driver.add("again", PROMPT, max_tokens=1)
    driver.run()
    assert driver.ends["again"].metrics.num_cached_tokens == 8


def test_switched_off_nothing_is_kept(fakes):
    driver = fakes.Driver(prefix_caching=False)
    for req_id in ("a", "b"):
        driver.add(req_id, PROMPT)
        driver.run()
    assert driver.ends["b"].metrics.num_cached_tokens == 0
    assert driver.scheduler.blocks.prefix is None
    driver.check_idle()
