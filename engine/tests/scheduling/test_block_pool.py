"""The block pool against a plain model, and what it refuses."""

from __future__ import annotations

import pytest
from hardpoint_engine.scheduling.block_pool import BlockAccountError, BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


class PoolMachine(RuleBasedStateMachine):
    """held: block -> count; named: contents findable; free in order of release."""

    @initialize(num_blocks=st.integers(2, 12), reserved=st.integers(1, 3))
    def start(self, num_blocks, reserved):
        self.total = max(num_blocks, reserved + 1)
        self.recycled = []
        self.pool = BlockPool(self.total, reserved=reserved, on_recycle=self.recycled.append)
        self.reserved = reserved
        self.held = {}
        self.named = set()
        self.kept = []

    @rule(data=st.data())
    def allocate(self, data):
        free = self.total - self.reserved - len(self.held)
        count = data.draw(st.integers(0, free))
        worthless = free - len(self.kept)
        before = len(self.recycled)
        blocks = self.pool.allocate(count)
        lost = self.kept[: max(0, count - worthless)]
        assert self.recycled[before:] == lost
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.held)
        self.kept = self.kept[len(lost) :]
        assert not set(blocks) & set(self.kept), "kept contents go last"
        self.named -= set(lost)
        self.held.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release([block])
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
            if block in self.named:
                self.kept.append(block)

    @precondition(lambda self: self.held or self.kept)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted(set(self.held) | set(self.kept))))
        self.pool.share([block])
        self.held[block] = self.held.get(block, 0) + 1
        self.kept = [other for other in self.kept if other != block]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data):
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.name(block)
        self.named.add(block)

    @rule()
    def forget_names(self):
        self.pool.forget_names()
        self.named.clear()
        self.kept.clear()

    @invariant()
    def accounts_add_up(self):
        if hasattr(self, "pool"):
            assert dict(self.pool.references) == self.held
            assert self.pool.num_free + len(self.held) == self.pool.num_usable
            assert self.pool.num_usable == self.total - self.reserved
            assert all(self.reserved <= block < self.total for block in self.held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_refuses_what_would_break_its_accounts():
    pool = BlockPool(4)
    held = pool.allocate(2)
    with pytest.raises(BlockAccountError, match="2 KV blocks wanted, 1 are free"):
        pool.allocate(2)
    with pytest.raises(BlockAccountError, match="3 has no contents"):
        pool.share([3])
    with pytest.raises(BlockAccountError, match="3 is named"):
        pool.name(3)
    pool.release(held)
    with pytest.raises(BlockAccountError, match="is released but nobody holds it"):
        pool.release(held)
    with pytest.raises(BlockAccountError, match="leave none"):
        BlockPool(2, reserved=2)


def test_touches_little_memory_when_nothing_is_worth_keeping():
    pool = BlockPool(1000)
    used = set()
    for _ in range(100):
        blocks = pool.allocate(3)
        used.update(blocks)
        pool.release(blocks)
    assert used == {1, 2, 3}
