"""The dispatcher against brute force over a whole small domain (case E9), and plugins' policies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from attrs import frozen
from hardpoint.errors import PluginError
from hardpoint_runtime.graphs.dispatcher import Dispatch, Dispatcher
from hardpoint_runtime.graphs.keys import BatchKey, KeyRules, lora_cases
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.plan import Capture, GraphPlan
from hardpoint_runtime.graphs.policy import DispatchPolicy
from hardpoint_runtime.graphs.sizes import CaptureSizes, capture_sizes

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
MOST_TOKENS = 17


class MultiplesOfThree(DispatchPolicy):
    """A unit that works on three tokens at a time."""

    def sizes(self, sizes):
        return sorted({-(-size // 3) * 3 for size in sizes})


class PiecesWhenLarge(DispatchPolicy):
    """Attention of large batches dominates: nothing is saved by a whole graph."""

    def modes(self, num_tokens, *, uniform):
        return (PIECEWISE, FULL) if num_tokens > 6 else (FULL, PIECEWISE)


class NothingOdd(DispatchPolicy):
    """Runs batches of odd length eagerly, and skips a size."""

    def pad(self, num_tokens, sizes):
        return None if num_tokens % 2 else sizes.pad(num_tokens + 1)


@frozen(kw_only=True)
class Batch:
    num_tokens: int
    num_reqs: int
    max_query: int
    active_loras: int


def batches(rules: KeyRules) -> Iterator[Batch]:
    """Every batch there can be."""
    for tokens in range(1, MOST_TOKENS + 1):
        for reqs in range(1, min(tokens, rules.max_num_seqs) + 1):
            for query in range(-(-tokens // reqs), tokens - reqs + 2):
                for active in range(min(reqs, rules.lora_cases[-1]) + 1):
                    yield Batch(
                        num_tokens=tokens, num_reqs=reqs, max_query=query, active_loras=active
                    )


def serves(graph: Capture, batch: Batch, mode: GraphMode, query: int) -> bool:
    """Whether replaying ``graph`` computes ``batch``, by what the graph's key says."""
    key = graph.key
    uniform = batch.max_query == query and batch.num_tokens == batch.num_reqs * query
    return (
        key.num_tokens >= batch.num_tokens
        and key.active_loras >= batch.active_loras
        and (key.num_reqs is None or key.num_reqs >= batch.num_reqs)
        and (uniform or not key.uniform)
        and graph.mode in {mode.decode if uniform else mode.mixed, mode.mixed}
    )


def best(plan: GraphPlan, batch: Batch, policy: DispatchPolicy) -> Dispatch:
    """Brute force: of all captured graphs that serve the batch, one of the preferred mode, then the
    smallest.
    """
    query = plan.rules.uniform_query
    uniform = batch.max_query == query and batch.num_tokens == batch.num_reqs * query
    found = [graph for graph in plan.graphs if serves(graph, batch, plan.mode, query)]
    if type(policy).pad is not DispatchPolicy.pad:
        sizes = CaptureSizes({graph.key.num_tokens for graph in plan.graphs})
        size = policy.pad(batch.num_tokens, sizes)
        found = [graph for graph in found if graph.key.num_tokens == size]
    if not found:
        key = BatchKey(
            num_tokens=batch.num_tokens,
            has_lora=batch.active_loras > 0,
            active_loras=batch.active_loras,
        )
        return Dispatch(mode=NONE, key=key)
    smallest = min(graph.key.num_tokens for graph in found)
    order = policy.modes(smallest, uniform=uniform)
    graph = min(
        found,
        key=lambda each: (
            order.index(each.mode),
            not each.key.uniform,
            each.key.num_tokens,
            each.key.active_loras,
        ),
    )
    return Dispatch(mode=graph.mode, key=graph.key)


LADDERS = {
    "default": None,
    "coarse": (5, 12, 15),
    "below the budget of decodes": (2, 3),
    "interleaved": (1, 3, 4, 7, 11, 16),
}


def make_plan(mode, query, max_num_seqs, loras, ladder, policy=None) -> GraphPlan:
    sizes = capture_sizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MOST_TOKENS,
        uniform_query=query,
        given=LADDERS[ladder],
    )
    rules = KeyRules(max_num_seqs=max_num_seqs, uniform_query=query, lora_cases=lora_cases(loras))
    return GraphPlan.make(mode, sizes, rules, policy=policy, max_num_batched_tokens=MOST_TOKENS)


POLICIES = (DispatchPolicy(), MultiplesOfThree(), PiecesWhenLarge(), NothingOdd())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("mode", GraphMode)
def test_the_choice_is_the_best_graph_and_every_graph_is_chosen(mode, ladder, policy):
    for query, max_num_seqs, loras in product((1, 2, 3), (1, 4), (0, 3)):
        plan = make_plan(mode, query, max_num_seqs, loras, ladder, policy)
        dispatcher = Dispatcher(plan)
        chosen = set()
        for batch in batches(plan.rules):
            dispatch = dispatcher.dispatch(
                batch.num_tokens, batch.num_reqs, batch.max_query, batch.active_loras
            )
            assert dispatch == best(plan, batch, policy), (query, max_num_seqs, loras, batch)
            if dispatch.mode is not NONE:
                chosen.add(Capture(mode=dispatch.mode, key=dispatch.key))
        assert chosen == plan.graphs, (query, max_num_seqs, loras)
        assert bool(plan.graphs) is (mode is not NONE and bool(chosen))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_what_is_not_allowed_is_never_chosen_and_eager_always_is(policy):
    allowances = [frozenset(), {PIECEWISE}, {FULL}, {NONE}, {FULL, PIECEWISE}]
    for mode, loras in product(GraphMode, (0, 2)):
        plan = make_plan(mode, 1, 3, loras, "default", policy)
        dispatcher = Dispatcher(plan)
        for batch, allowed in product(batches(plan.rules), allowances):
            given = set(allowed)
            dispatch = dispatcher.dispatch(
                batch.num_tokens,
                batch.num_reqs,
                batch.max_query,
                batch.active_loras,
                allowed=given,
            )
            assert given == allowed
            if dispatch.mode is NONE:
                assert dispatch.key.num_tokens == batch.num_tokens
                continue
            assert dispatch.mode in allowed
            graph = Capture(mode=dispatch.mode, key=dispatch.key)
            assert graph in plan.graphs
            assert serves(graph, batch, plan.mode, 1)


def test_a_restricted_batch_takes_the_next_best():
    dispatcher = Dispatcher(make_plan(GraphMode.FULL_AND_PIECEWISE, 1, 3, 0, "default"))
    assert dispatcher.dispatch(3, 3, 1).mode is FULL
    dispatch = dispatcher.dispatch(3, 3, 1, allowed={PIECEWISE})
    assert dispatch == Dispatch(mode=PIECEWISE, key=BatchKey(num_tokens=4))


def test_batches_beyond_what_is_planned_run_eagerly():
    dispatcher = Dispatcher(make_plan(FULL, 1, 3, 2, "default"))
    largest = dispatcher.plan.largest
    for tokens, reqs, query, active in (
        (largest + 1, 1, largest + 1, 0),
        (10_000, 3, 9_000, 0),
        (4, 4, 1, 0),  # more requests than may run
        (3, 3, 1, 4),  # more adapters than may be loaded
    ):
        dispatch = dispatcher.dispatch(tokens, reqs, query, active)
        assert (dispatch.mode, dispatch.key.num_tokens) == (NONE, tokens)


def test_the_plan_without_graphs():
    plan = GraphPlan.eager()
    assert (plan.captures(), plan.largest) == ((), 0)
    assert Dispatcher(plan).dispatch(1, 1, 1).mode is NONE
    assert make_plan(FULL, 1, 3, 0, "default", NothingAtAll()).captures() == ()


class NothingAtAll(DispatchPolicy):
    def sizes(self, sizes):
        return ()


@pytest.mark.parametrize("mode", [PIECEWISE, FULL, GraphMode.FULL_AND_PIECEWISE])
def test_captures_are_in_order(mode):
    captures = make_plan(mode, 2, 5, 3, "default").captures()
    assert len(captures) == len(set(captures)) > 5
    order = [(each.mode is FULL, -each.key.num_tokens) for each in captures]
    assert order == sorted(order)
    cases = [each.key.active_loras for each in captures if each.key == captures[0].key]
    assert cases == sorted(cases, reverse=True)


def test_nothing_is_planned_that_no_batch_takes():
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, 1, 3, 0, "default")
    keys = {mode: set() for mode in (PIECEWISE, FULL)}
    for graph in plan.graphs:
        keys[graph.mode].add((graph.key.num_tokens, graph.key.num_reqs))
    assert keys[FULL] == {(1, 1), (2, 2), (4, 3)}
    assert keys[PIECEWISE] == {(2, None), (4, None)}  # one token is always a decode


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_one_graph_of_a_size_serves_all_batches_unless_decode_has_its_own(mode):
    plan = make_plan(mode, 1, 3, 0, "default")
    assert plan.graphs
    assert not any(graph.key.uniform for graph in plan.graphs)
    sizes = [graph.key.num_tokens for graph in plan.graphs]
    assert len(sizes) == len(set(sizes))


def test_a_policy_of_threes_has_multiples_of_three_only():
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, 1, 5, 0, "default", MultiplesOfThree())
    sizes = {graph.key.num_tokens for graph in plan.graphs}
    assert sizes == {3, 6, 9}
    dispatch = Dispatcher(plan).dispatch(4, 4, 1)
    assert dispatch.key == BatchKey(num_tokens=6, num_reqs=5, uniform=True)


class Down(DispatchPolicy):
    def pad(self, num_tokens, sizes):
        return max((size for size in sizes.sizes if size <= num_tokens), default=None)


class Elsewhere(DispatchPolicy):
    def pad(self, num_tokens, sizes):
        return 1000


class Negative(DispatchPolicy):
    def sizes(self, sizes):
        return [-4, 8]


class Paired(DispatchPolicy):
    def modes(self, num_tokens, *, uniform):
        return [GraphMode.FULL_AND_PIECEWISE]


def answering(**answers) -> DispatchPolicy:
    """Return a policy with an answer of its own to one question, whatever is asked."""
    methods = {
        name: lambda self, *args, answer=answer, **more: answer for name, answer in answers.items()
    }
    return type("Answering", (DispatchPolicy,), methods)()


def raising(question) -> DispatchPolicy:
    return type("Raising", (DispatchPolicy,), {question: lambda *args, **more: 1 // 0})()


def test_what_a_step_cannot_have_and_what_is_behind_none_is_left_out():
    plan = make_plan(FULL, 1, 3, 0, "default", answering(sizes=[2, MOST_TOKENS + 1]))
    assert {graph.key.num_tokens for graph in plan.graphs} == {2}
    mode = GraphMode.FULL_AND_PIECEWISE
    assert not make_plan(mode, 1, 3, 0, "default", answering(modes=[NONE, FULL])).graphs
    plan = make_plan(mode, 1, 3, 0, "default", answering(modes=[FULL, NONE, PIECEWISE]))
    assert {graph.mode for graph in plan.graphs} == {FULL}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Down(), r"Down: pad\(3\) gave 2: it must be one of the sizes .* and at least 3"),
        (Elsewhere(), r"Elsewhere: pad\(1\) gave 1000"),
        (Negative(), "Negative: sizes gave -4"),
        (Paired(), r"Paired: modes\(\d+\) gave"),
        (answering(sizes=None), "Answering: sizes gave None, which is no sequence"),
        (answering(sizes="12"), "Answering: sizes gave '12', which is no sequence"),
        (answering(sizes=[True]), "Answering: sizes gave True, which is no positive number"),
        (answering(sizes=[2.0]), "Answering: sizes gave 2.0, which is no positive number"),
        (answering(pad="4"), r"Answering: pad\(1\) gave '4': it must be one of the sizes"),
        (answering(pad=8.0), r"Answering: pad\(1\) gave 8.0: it must be one of the sizes"),
        (answering(pad=True), r"Answering: pad\(1\) gave True: it must be one of the sizes"),
        (answering(modes=None), "Answering: modes gave None, which is no sequence"),
        (answering(modes=FULL), "Answering: modes gave .*FULL.*, which is no sequence"),
        (answering(modes=["full"]), r"Answering: modes\(\d+\) gave 'full'"),
        (raising("sizes"), "Raising: sizes raised ZeroDivisionError: "),
        (raising("pad"), "Raising: pad raised ZeroDivisionError: "),
        (raising("modes"), "Raising: modes raised ZeroDivisionError: "),
    ],
)
def test_a_policy_that_cannot_be_followed_is_named(policy, words):
    with pytest.raises(PluginError, match=words):
        make_plan(FULL, 1, 3, 0, "default", policy)
