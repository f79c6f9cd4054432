"""Model runners that are wrong in one way each: the dummy's, with a part replaced."""

from __future__ import annotations

from attrs import evolve
from hardpoint.messages import ModelRunnerOutput
from hardpoint_dummy.cache import FakeCache
from hardpoint_dummy.model import FakeModel
from hardpoint_dummy.model_runner import DummyModelRunner
from hardpoint_dummy.requests import RequestTable
from mutation import broken


class Runner(DummyModelRunner):
    """The dummy's runner with parts that a mutant names."""

    cache_class = FakeCache
    table_class = RequestTable
    model_class = FakeModel

    def __init__(self, context, platform, registry):
        super().__init__(context, platform, registry)
        self.requests = self.table_class(trim=not self.config.scheduler.async_scheduling)

    def initialize_kv_cache(self, kv_cache_config):
        super().initialize_kv_cache(kv_cache_config)
        self._cache = self.cache_class(kv_cache_config.num_blocks, self._cache.block_sizes)

    def reload_weights(self, path):
        report = super().reload_weights(path)
        self._model = self.model_class(self._model.weights, self._model.vocab_size)
        return report

    def change(self, output: ModelRunnerOutput, step) -> ModelRunnerOutput:
        """Spoil an output; for mutants."""
        return output

    def _sample(self, computed, grammar):
        return self.change(super()._sample(computed, grammar), computed.step)


# The cache.


class _OneSlotOff(FakeCache):
    def write(self, tables, position, cell):
        size = self.block_sizes[0]
        wrong = position % size == size - 1 and position >= size
        super().write(tables, position - 1 if wrong else position, cell)


@broken(
    "the last position of a block, but the first, is written one slot early",
    "test_greedy_ids_are_the_oracles", "test_an_answer_over_many_blocks",
)  # fmt: skip
class WrongSlot(Runner):
    cache_class = _OneSlotOff


class _NeverZeroed(FakeCache):
    def zero(self, block):
        pass


@broken("blocks_to_zero is ignored", "test_a_zeroed_block_keeps_nothing")
class NotZeroed(Runner):
    cache_class = _NeverZeroed


class _AllZeroed(FakeCache):
    def zero(self, block):
        for each in range(1, self.num_blocks):
            super().zero(each)


@broken("blocks_to_zero zeroes every block", "test_a_zeroed_block_keeps_nothing")
class AllZeroed(Runner):
    cache_class = _AllZeroed


class _NeverCopied(FakeCache):
    def copy(self, group, source, destination):
        pass


@broken("block_copies is ignored", "test_a_copied_block_is_the_block")
class NotCopied(Runner):
    cache_class = _NeverCopied


class _CopiedTheOtherWay(FakeCache):
    def copy(self, group, source, destination):
        super().copy(group, destination, source)


@broken("blocks are copied from destination to source", "test_a_copied_block_is_the_block")
class CopiedBackwards(Runner):
    cache_class = _CopiedTheOtherWay


class _HalfOfTheBlocks(FakeCache):
    def _fold(self, tables):
        return [[(index - 1) % (self.num_blocks // 2) + 1 for index in table] for table in tables]

    def write(self, tables, position, cell):
        super().write(self._fold(tables), position, cell)

    def contents(self, tables, length):
        return super().contents(self._fold(tables), length)

    def read(self, tables, position):
        return super().read(self._fold(tables), position)


@broken(
    "the upper half of the blocks lies over the lower half", "test_random_histories_are_the_oracles"
)
class HalfTheCache(Runner):
    cache_class = _HalfOfTheBlocks


# The table of requests.


class _Appended(RequestTable):
    def _update(self, running):
        for index, req_id in enumerate(running.req_ids):
            if req_id in running.resumed:
                old = [list(group) for group in self.before.get(req_id, ())]
                for mine, added in zip(old, running.new_blocks[index] or (), strict=False):
                    mine.extend(added[len(mine) :])
                running = evolve(
                    running,
                    new_blocks=(
                        *running.new_blocks[:index],
                        tuple(map(tuple, old)),
                        *running.new_blocks[index + 1 :],
                    ),
                )
        return super()._update(running)

    def apply(self, step):
        self.before = getattr(self, "before", {})
        for req_id in step.preempted:
            self.before[req_id] = [list(group) for group in self[req_id].blocks]
        return super().apply(step)


@broken(
    "a resumed request keeps its old block table",
    "test_a_preempted_request_resumes_with_other_blocks",
)
class StaleTable(Runner):
    table_class = _Appended


class _Remembers(RequestTable):
    kept: tuple[str, ...] = ()

    def apply(self, step):
        self.old = {req_id: self[req_id] for req_id in step.finished if req_id in self._states}
        return super().apply(step)

    def _add(self, new):
        state = super()._add(new)
        if new.req_id in self.old:
            for name in self.kept:
                setattr(state, name, getattr(self.old[new.req_id], name))
        return state


class _RemembersBlocks(_Remembers):
    def _add(self, new):
        state = super()._add(new)
        if new.req_id in self.old:
            state.blocks = [
                old + fresh
                for old, fresh in zip(self.old[new.req_id].blocks, state.blocks, strict=True)
            ]
        return state


@broken("a used id keeps the blocks of its finished request", "test_an_id_can_be_used_again")
class NeverForgetsBlocks(Runner):
    table_class = _RemembersBlocks


class _RemembersParameters(_Remembers):
    kept = ("sampling",)


@broken("a used id keeps the parameters of its finished request", "test_an_id_can_be_used_again")
class NeverForgetsParameters(Runner):
    table_class = _RemembersParameters


class _IgnoresAllTokens(RequestTable):
    def _add(self, new):
        state = super()._add(new)
        beyond = len(state.tokens) - len(new.prompt)
        state.tokens[len(new.prompt) :] = [0] * beyond
        return state


@broken(
    "prefill_tokens is ignored: of a request computed anew, the answer so far is read as zeros",
    "test_a_request_that_is_computed_anew_elsewhere_goes_on",
)
class ForgetsItsAnswer(Runner):
    table_class = _IgnoresAllTokens


@broken(
    "a request computed anew is sampled only when its prompt ends a step",
    "test_a_request_that_is_computed_anew_elsewhere_goes_on",
)
class SampledAtThePromptOnly(Runner):
    def _forward(self, state, count, drafts):
        anew = bool(state.output) and not state.num_computed
        return super()._forward(state, count, drafts) and not anew


class _FirstBlocksOnly(RequestTable):
    def _update(self, running):
        first = next((each for each in running.new_blocks if each is not None), None)
        given = tuple(each and first for each in running.new_blocks)
        return super()._update(evolve(running, new_blocks=given))


@broken(
    "running requests that grow in one step get the new blocks of the first",
    "test_requests_that_grow_together_get_each_its_own_blocks",
)
class BlocksOfTheFirst(Runner):
    table_class = _FirstBlocksOnly


# The forward.


@broken("the number of computed tokens is ignored", "test_a_prompt_in_chunks_is_the_prompt")
class ChunksFromTheStart(Runner):
    def _forward(self, state, count, drafts):
        if state.num_computed and state.num_computed + count <= state.prompt_length:
            after = state.num_computed + count
            state.num_computed = 0
            super()._forward(state, count, drafts)
            state.num_computed = after
            return after >= len(state.tokens)
        return super()._forward(state, count, drafts)


@broken("an unfinished prompt is sampled", "test_an_unfinished_prompt_is_not_sampled")
class SampledTooEarly(Runner):
    def _forward(self, state, count, drafts):
        super()._forward(state, count, drafts)
        return True


@broken(
    "the first token after a prefix that is in the cache is passed over",
    "test_a_prefix_in_the_cache_is_used_as_it_is",
)
class SkipsAfterThePrefix(Runner):
    def _forward(self, state, count, drafts):
        if state.num_computed and not state.output and count > 1:
            state.num_computed, count = state.num_computed + 1, count - 1
        return super()._forward(state, count, drafts)


@broken("adapters do not touch the cache", "test_an_adapter_is_of_the_requests_that_name_it")
class AdapterIgnored(Runner):
    def salt(self, state):
        return 0


@broken(
    "a batch that is padded to a power of two loses its last request's newest position",
    "test_every_size_of_a_batch",
)
class PaddingOverARow(Runner):
    def _compute(self, step):
        computed = super()._compute(step)
        count = len(computed.order)
        if count and count & (count - 1):
            state = computed.order[-1]
            self.cache.write(state.blocks, state.num_computed - 1, 1)
        return computed


@broken(
    "from the fifth request of a batch on, the newest position is lost",
    "test_a_full_batch_is_its_requests", "test_every_size_of_a_batch",
)  # fmt: skip
class WrongFromTheFifth(Runner):
    def _sample(self, computed, grammar):
        for state in computed.order[4:]:
            self.cache.write(state.blocks, state.num_computed - 1, 1)
        return super()._sample(computed, grammar)


@broken("a batch of more than eight is padded over its last request", "test_every_size_of_a_batch")
class BucketOfEight(Runner):
    def _sample(self, computed, grammar):
        for state in computed.order[8:]:
            self.cache.write(state.blocks, state.num_computed - 1, 1)
        return super()._sample(computed, grammar)


@broken("padding is written into blocks of requests that wait", "test_padding_is_inert")
class PaddingNotInert(Runner):
    def _compute(self, step):
        computed = super()._compute(step)
        for req_id in set(self.requests) - set(step.num_tokens):
            state = self.requests[req_id]
            if state.num_computed and any(state.blocks):
                self.cache.write(state.blocks, 0, 1)
        return computed


@broken(
    "what is computed depends a little on how many are in the batch",
    "test_scores_are_bitwise_equal_in_any_batch",
)
class DependsOnTheBatch(Runner):
    def _compute(self, step):
        self._model.noise = 1e-9 * len(step.num_tokens)
        return super()._compute(step)

    class model_class(FakeModel):  # noqa: N801 - a part of the runner
        noise = 0.0

        def logits(self, state):
            return [logit * (1 + self.noise) for logit in super().logits(state)]


@broken("nothing", suite="ModelRunnerSuite")
class TwinRunner(Runner):
    """Unbroken."""
