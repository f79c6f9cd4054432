"""What befalls a request: preemption, another's blocks, shared prefixes, recovery."""

from __future__ import annotations

import random

from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.messages import SchedulerOutput
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect_equal
from hardpoint_conformance.generation import SCORED, scored_if
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.steps import GREEDY, Request
from hardpoint_conformance.suite import needs


class HistoryTests(ModelRunnerPart):
    """The answer is as if none of it had happened."""

    def test_a_preempted_request_resumes_with_other_blocks(self) -> None:
        """Its old blocks are given to somebody else at once, who overwrites them."""
        bench = self.bench
        sampling = scored_if(self.supports(Capability.LOGPROBS))
        request = bench.steps.add((5, 40, 41, 42, 43, 44), sampling)
        bench.steps.run(5)
        old = list(request.blocks)
        bench.steps.preempt(request)
        del bench.steps.requests[request.req_id]
        thief = bench.steps.add(tuple(range(60, 78)), sampling)
        thief.blocks = old
        for block in old:
            bench.steps.free.remove(block)
        bench.steps.run(4)
        bench.check_greedy(thief, "a request in blocks that another lost")
        bench.steps.requests[request.req_id] = request
        bench.steps.run(9)
        for each, what in (
            (request, "a request that was preempted and resumed"),
            (thief, "a request in blocks of one that is resumed beside it"),
        ):
            bench.check_greedy(each, what)
            if each.logprobs:
                bench.check_scores(each, what)

    def test_a_request_resumes_in_its_old_blocks_in_another_order(self) -> None:
        """New blocks of a resumed request replace all that it had."""
        bench = self.bench
        request = bench.steps.add([3 + place % 150 for place in range(3 * bench.steps.block_size)])
        bench.steps.run(2)
        old = list(request.blocks)
        bench.steps.preempt(request)
        request.blocks = old[::-1]
        for block in old:
            bench.steps.free.remove(block)
        bench.steps.run(6)
        bench.check_greedy(request, "a request resumed in its old blocks in the reverse order")

    def test_a_request_that_is_computed_anew_elsewhere_goes_on(self) -> None:
        """``prefill_tokens``: prompt and answer so far, for workers that never saw it."""
        bench = self.bench
        again = bench.steps.recompute(bench.steps.alone((9, 8, 7, 6), 5))
        bench.steps.run(9)
        bench.check_greedy(again, "a request recomputed from its tokens")

    def test_an_id_can_be_used_again(self) -> None:
        """What was finished is forgotten, in the order: finished first, then new. Its blocks are
        somebody else's, its parameters nobody's.
        """
        bench = self.bench
        barred = bench.oracle_tokens(Request("", (), GREEDY, [70, 71, 72, 73]), 1)
        first = bench.steps.add((4, 5, 6), self._barring(barred[0]))
        bench.steps.run(3)
        old = list(first.blocks)
        bench.steps.finish(first)
        second = bench.steps.add((70, 71, 72, 73))
        del bench.steps.requests[second.req_id]
        second.req_id = first.req_id
        thief = bench.steps.add(tuple(range(60, 66)), blocks=old)
        for block in old:
            bench.steps.free.remove(block)
        bench.steps.requests[second.req_id] = second
        bench.steps.run(5)
        bench.check_greedy(second, "a request with the id of one that was finished")
        bench.check_greedy(thief, "a request in the blocks of one that was finished")

    def _barring(self, token: int) -> SamplingParams:
        """Return greedy parameters that never give ``token``, where the platform has such."""
        barring = evolve(GREEDY, logit_bias={token: -100.0})
        return GREEDY if self.bench.refused(barring) else barring

    @needs(Capability.PREFIX_CACHING)
    def test_a_prefix_in_the_cache_is_used_as_it_is(self) -> None:
        """A request whose first blocks are another's, computed already."""
        bench = self.bench
        size = bench.steps.block_size
        prefix = [3 + 5 * place % 80 for place in range(2 * size)]
        owner = bench.steps.add([*prefix, 90, 91])
        bench.steps.run(2)
        sampling = scored_if(self.supports(Capability.LOGPROBS))
        sharer = bench.steps.add(
            [*prefix, 50, 51, 52], sampling, computed=2 * size, blocks=owner.blocks[:2]
        )
        bench.steps.run(7)
        for request in (owner, sharer):
            bench.check_greedy(request, "requests that share the blocks of a prefix")
        if sharer.logprobs:
            bench.check_scores(sharer, "a request whose prefix was in the cache")
        sharer.blocks = sharer.blocks[2:]

    @needs(Capability.BLOCK_COPIES)
    def test_a_copied_block_is_the_block(self) -> None:
        """Copies come before the forward pass of the same step."""
        bench = self.bench
        size = bench.steps.block_size
        prefix = [4 + 7 * place % 80 for place in range(size)]
        owner = bench.steps.add([*prefix, 33])
        bench.steps.run(1)
        target = bench.steps.free.pop()
        copy = bench.steps.add([*prefix, 20, 21], computed=size, blocks=[target])
        source = owner.blocks[0]
        bench.steps.step({copy.req_id: 2}, block_copies=((0, source, target),))
        bench.steps.run(5)
        bench.check_greedy(copy, "a request whose first block was copied from another's")
        bench.check_greedy(owner, "a request whose first block was copied for another")

    @needs(Capability.BLOCK_COPIES)
    def test_a_zeroed_block_keeps_nothing(self) -> None:
        """Two blocks with different pasts, zeroed, are one as good as the other."""
        bench = self.bench
        size = bench.steps.block_size
        bystander = bench.steps.add((9, 8, 7))
        bench.steps.run(1)
        del bench.steps.requests[bystander.req_id]
        pasts = [bench.steps.add([base + place for place in range(size)]) for base in (20, 60)]
        bench.steps.run(1)
        blocks = [past.blocks[0] for past in pasts]
        bench.steps.finish(*pasts)
        for block in blocks:
            bench.steps.free.remove(block)
        readers = [bench.steps.add([5] * size + [6], SCORED, computed=size, blocks=[block])
                   for block in blocks]  # fmt: skip
        for index, reader in enumerate(readers):
            zero = tuple(blocks) if index == 0 else ()
            bench.steps.step({reader.req_id: 1}, blocks_to_zero=zero)
        first, second = (
            [(row.ids, row.values) for row in reader.logprobs] or reader.output
            for reader in readers
        )
        expect_equal(
            first, second, "blocks_to_zero are zero before the step reads them",
            where=SchedulerOutput,
            do="Clear the named blocks in every layer before copies and the forward pass.",
        )  # fmt: skip
        bench.steps.finish(*readers)
        bench.steps.requests[bystander.req_id] = bystander
        bench.steps.run(6)
        bench.check_greedy(bystander, "a request that waited while blocks of others were zeroed")

    def test_random_histories_are_the_oracles(self) -> None:
        """Requests that come, go, are cut, preempted and resumed, by chance."""
        bench = self.bench
        rng = random.Random(4)  # noqa: S311 - a history, not a secret
        steps = bench.steps
        prompts = iter(bench.prompts(40, seed=11, longest=16))
        held: dict[str, Request] = {}
        for _ in range(40):
            if len(steps.requests) + len(held) < bench.most_seqs and rng.random() < 0.7:
                steps.add(next(prompts))
            if steps.requests and rng.random() < 0.2:
                victim = rng.choice(list(steps.requests.values()))
                if victim.known and victim.output:
                    steps.preempt(victim)
                    held[victim.req_id] = steps.requests.pop(victim.req_id)
            if held and rng.random() < 0.4:
                req_id = rng.choice(list(held))
                steps.requests[req_id] = held.pop(req_id)
            if steps.requests:
                steps.round()
            for request in list(steps.requests.values()):
                if len(request.output) >= 12:
                    bench.check_greedy(request, "in a random history")
                    steps.finish(request)
        steps.requests |= held
        for request in list(steps.requests.values()):
            bench.check_greedy(request, "in a random history")
