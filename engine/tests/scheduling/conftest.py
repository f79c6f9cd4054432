"""A worker made of dictionaries that believes nothing: it checks every plan, and its next token is
a function of what it reads back from the cache through the request's blocks.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from hardpoint.messages import MessageError, ModelRunnerOutput
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.request import EngineRequest
from hardpoint_engine.scheduling.block_pool import BlockPool
from hardpoint_engine.scheduling.kv_blocks import KVBlocks
from hardpoint_engine.scheduling.scheduler import Scheduler
from hardpoint_engine.scheduling.step_draft import StepLimits
from hardpoint_engine.scheduling.stopping import StopRule

VOCAB = 97


def next_token(tokens):
    return zlib.crc32(repr(tuple(tokens)).encode()) % VOCAB


def answer(prompt, count):
    """What the model says to ``prompt``, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class Copy:
    """The worker's copy of a request."""

    def __init__(self, tokens, blocks):
        self.tokens = list(tokens)
        self.blocks = [list(group) for group in blocks]
        self.parked = False
        self.prefill_until = len(self.tokens)
        self.told = list(tokens)
        """What an earlier stage of a pipeline has, which samples nothing."""


class Worker:
    def __init__(self, scheduler, *, reserved=1):
        self.limits = scheduler.limits
        self.block_size = scheduler.blocks.block_size
        self.num_blocks = scheduler.blocks.pool.num_blocks
        self.num_groups = scheduler.num_groups
        self.reserved = reserved
        self.slots = {}
        self.copies = {}
        self.last_step = 0
        self.computed_tokens = 0
        self.resumptions = 0
        self.plans = []
        self.unheard = set()
        """Of whom a plan told that never came: what is known of them is stale."""
        self.depth = scheduler.depth
        self.tells_tokens = scheduler.tells_tokens

    def execute(self, plan):
        plan.check()
        assert plan.step_id == self.last_step + 1, "steps are numbered one by one"
        self.last_step = plan.step_id
        self.plans.append(plan)
        self.unheard -= plan.finished | plan.preempted | plan.running.resumed
        for req_id in plan.finished:
            self.copies.pop(req_id, None)
        for req_id in plan.preempted:
            self.copies[req_id].parked = True
            assert req_id not in plan.num_tokens
        computed, is_prefill = self._update(plan)
        self._check_limits(plan, is_prefill, computed)
        self._check_blocks(plan, computed)
        rows = {}
        for req_id, count in plan.num_tokens.items():
            rows[req_id] = self._compute(req_id, computed[req_id], count)
        for req_id, row in rows.items():
            self.copies[req_id].tokens.extend(row)
        self.computed_tokens += plan.total_tokens
        order = sorted(rows, key=lambda r: zlib.crc32(r.encode()))  # any order is allowed
        return ModelRunnerOutput(
            step_id=plan.step_id,
            req_ids=tuple(order),
            tokens=tuple(tuple(rows[req_id]) for req_id in order),
        )

    def _update(self, plan):
        computed = {}
        is_prefill = set()
        for new in plan.new:
            assert new.req_id not in self.copies, "new means unknown"
            assert new.sampling.seed is not None or new.sampling.greedy
            known = new.prefill_tokens or new.prompt
            assert new.num_computed < len(known), "something is left to sample from"
            self.copies[new.req_id] = Copy(known, new.block_ids)
            computed[new.req_id] = new.num_computed
            is_prefill.add(new.req_id)
        running = plan.running
        assert running.resumed <= set(running.req_ids)
        for index, req_id in enumerate(running.req_ids):
            copy = self.copies[req_id]
            blocks = running.new_blocks[index]
            if req_id in running.resumed:
                copy.parked = False
                copy.blocks = [list(group) for group in blocks]
                copy.prefill_until = len(copy.tokens)
                self.resumptions += 1
            else:
                assert not copy.parked, "a preempted request comes back as resumed"
                for group, added in zip(copy.blocks, blocks or (), strict=bool(blocks)):
                    assert added
                    group.extend(added)
            self._tell(copy, running, index)
            computed[req_id] = running.num_computed[index]
            if computed[req_id] < copy.prefill_until:
                is_prefill.add(req_id)
        return computed, is_prefill

    def _tell(self, copy, running, index):
        if not self.tells_tokens:
            assert not running.new_tokens
            return
        known = len(copy.tokens) - running.num_output[index]
        assert running.told(index, running.num_output[index]) == (), "a last stage lacks nothing"
        copy.told += running.told(index, len(copy.told) - known)
        assert copy.told == copy.tokens, "an earlier stage lacks what was sampled"

    def _check_limits(self, plan, is_prefill, computed):
        limits = self.limits
        assert 0 < plan.total_tokens <= limits.max_num_batched_tokens
        live = [copy for copy in self.copies.values() if not copy.parked]
        assert len(live) <= limits.max_num_seqs or self.depth > 1  # (one may not have heard yet)
        assert len(plan.num_tokens) <= limits.max_num_seqs
        if limits.max_prefills_per_step is not None:
            assert len(is_prefill) <= limits.max_prefills_per_step
        if not limits.mixed_batches:
            assert not is_prefill or len(is_prefill) == len(plan.num_tokens)
        for req_id in is_prefill:
            count = plan.num_tokens[req_id]
            assert count <= limits.longest_chunk
            if computed[req_id] + count < len(self.copies[req_id].tokens):
                assert limits.chunked
                assert count % limits.chunk_multiple == 0

    def _check_blocks(self, plan, computed):
        owners = Counter()
        for req_id, copy in self.copies.items():
            assert len(copy.blocks) == self.num_groups
            assert all(group == copy.blocks[0] for group in copy.blocks)
            if not copy.parked and req_id not in self.unheard:
                assert len(set(copy.blocks[0])) == len(copy.blocks[0])
                owners.update(copy.blocks[0])
        assert all(self.reserved <= block < self.num_blocks for block in owners)
        for req_id, count in plan.num_tokens.items():
            first = computed[req_id] // self.block_size
            last = (computed[req_id] + count - 1) // self.block_size
            for block in self.copies[req_id].blocks[0][first : last + 1]:
                assert owners[block] == 1, f"block {block} is written but shared"

    def _compute(self, req_id, computed, count):
        copy = self.copies[req_id]
        size = self.block_size
        table = copy.blocks[0]
        for position in range(computed, computed + count):
            self.slots[table[position // size], position % size] = copy.tokens[position]
        known = computed + count
        read = [self.slots.get((table[p // size], p % size)) for p in range(known)]
        assert read == copy.tokens[:known], f"{req_id} reads another's or a stale cache"
        return [next_token(read)] if known == len(copy.tokens) else []


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


def make_scheduler(
    *, num_blocks=65, block_size=4, reserved=1, prefix_caching=True, num_groups=1, **options
):
    admission = options.pop("admission", None)
    more = {
        name: options.pop(name)
        for name in ("depth", "tells_tokens", "processors")
        if name in options
    }
    limits = StepLimits(
        max_num_seqs=options.pop("max_num_seqs", 16),
        max_num_batched_tokens=options.pop("max_num_batched_tokens", 64),
        **options,
    )
    pool = BlockPool(num_blocks, reserved=reserved)
    blocks = KVBlocks(pool, block_size, prefix_caching=prefix_caching, identity=("fake",))
    return Scheduler(
        limits, blocks, clock=Clock(), num_groups=num_groups, admission=admission, **more
    )


def make_request(req_id, prompt, *, max_tokens=8, **options):
    fields = ("priority", "cache_salt", "lora", "prompt_adapter", "extra")
    more = {name: options.pop(name) for name in fields if name in options}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    return EngineRequest(req_id=req_id, prompt=prompt, sampling=sampling, arrival=0.0, **more)


class Flight:
    """A step that the worker has. It writes ``blocks``. ``requests`` are the driver's accounts."""

    def __init__(self, plan, result, blocks, requests):
        self.plan = plan
        self.result = result
        self.blocks = blocks
        self.requests = requests


class Driver:
    """A scheduler and a worker, and what came out for each request.

    The worker computes a step when it is launched; its result is taken in when it lands.
    """

    def __init__(self, scheduler=None, *, eos_ids=(), max_model_len=None, reserved=1, **options):
        self.scheduler = scheduler or make_scheduler(reserved=reserved, **options)
        blocks = self.scheduler.blocks
        self.max_model_len = max_model_len or blocks.pool.num_usable * blocks.block_size
        self.worker = Worker(self.scheduler, reserved=reserved)
        self.eos_ids = eos_ids
        self.tokens = {}
        self.ends = {}
        self.prompts = {}
        self.flights = deque()

    def add(self, req_id, prompt, **options):
        source = make_request(req_id, prompt, **options)
        rule = StopRule.of(source.sampling, len(prompt), self.eos_ids, self.max_model_len)
        self.prompts[req_id] = tuple(prompt)
        self.tokens[req_id] = ()
        return self.scheduler.roster.add(source, rule)

    def take(self, outputs):
        for output in outputs:
            assert output.req_id not in self.ends, "nothing follows the end"
            self.tokens[output.req_id] += output.new_tokens
            if output.finish_reason:
                self.ends[output.req_id] = output
                assert output.metrics.num_generation_tokens >= len(self.tokens[output.req_id])
            else:
                assert output.new_tokens
                assert output.metrics is None

    def launch(self, fate="done"):
        """Plan a step and give it to the worker; ``fate``: it is done, its answer is lost, or it
        never reaches the worker. None if nothing can run now.
        """
        assert len(self.flights) < self.scheduler.depth
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        requests = dict(self.scheduler.roster.in_flight[plan.step_id])
        blocks = self._check_apart(plan, requests)
        if fate == "never":
            self.worker.last_step += 1
            self.worker.unheard |= plan.finished | plan.preempted | plan.num_tokens.keys()
            result = MessageError("never sent")
        else:
            result = self.worker.execute(plan)
            result = MessageError("lost") if fate == "lost" else result
        self.flights.append(Flight(plan, result, blocks, requests))
        return plan

    def _check_apart(self, plan, requests):
        """A step has no request of another in flight, and no block that another writes."""
        size = self.scheduler.blocks.block_size
        held, written = set(), set()
        for req_id, request in requests.items():
            held.update(request.blocks)
            first, end = request.num_computed, request.num_computed + plan.num_tokens[req_id]
            written.update(request.blocks[first // size : -(-end // size)])
        for flight in self.flights:
            assert not flight.blocks & held, "a block is handed out while a step writes it"
            assert not set(flight.requests.values()) & set(requests.values())
        return written

    def land(self):
        """Take in the result of the oldest step."""
        flight = self.flights.popleft()
        if isinstance(flight.result, Exception):
            self.take(self.scheduler.fail(flight.plan, flight.result))
        else:
            self.take(self.scheduler.commit(flight.plan, flight.result))
        return flight

    def step(self):
        """Fill the pipeline, land the oldest step; return the last plan made."""
        last = None
        while len(self.flights) < self.scheduler.depth and (plan := self.launch()):
            last = plan
        if self.flights:
            self.land()
        self.take(self.scheduler.roster.take_ended())
        return last

    def run(self, most=5000):
        for _ in range(most):
            if not len(self.scheduler.roster) and not self.flights:
                self.step()
                return self
            self.step()
        raise AssertionError(f"{len(self.scheduler.roster)} requests never end")

    def check_idle(self):
        """Nobody holds a block; cached ones count as free."""
        pool = self.scheduler.blocks.pool
        assert not self.scheduler.roster.in_flight
        assert not pool.references
        assert pool.num_free == pool.num_usable


@pytest.fixture(scope="session")
def fakes(lines_run):
    return SimpleNamespace(
        VOCAB=VOCAB,
        Clock=Clock,
        Driver=Driver,
        Worker=Worker,
        answer=answer,
        lines_run=lines_run,
        make_request=make_request,
        make_scheduler=make_scheduler,
        next_token=next_token,
    )
