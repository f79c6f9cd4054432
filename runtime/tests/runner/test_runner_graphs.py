"""Steps through graphs: the tokens of eager steps, padding that nobody notices, memory that may not
move.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from attrs import evolve, frozen
from hardpoint.config.schema import GraphConfig
from hardpoint.errors import CancelledStepError, ConfigError, LifecycleError
from hardpoint.records import Offer
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.attention import paged
from hardpoint_runtime.graphs.errors import GraphCaptureError
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.piecewise import EagerPiece, PiecewiseGraph, Segment
from hardpoint_runtime.graphs.plan import Capture
from hardpoint_runtime.graphs.resolution import AttentionSupport
from hardpoint_runtime.graphs.support import graph_support
from hardpoint_runtime.model_runner import TorchModelRunner

EAGER = {}
MODES = ("piecewise", "full", "full_and_piecewise", "full_decode_only")
LAYERS = 2


def drawn(seed):
    """Draws that noise in the last bits does not change, with the scores that they came from."""
    return SamplingParams(temperature=1.0, seed=seed, logprobs=3, max_tokens=None)


def history(driver, seed, steps=30):
    """Steps of random requests with random chunks, ends and preemptions; return all tokens and
    scores, and what the steps said of graphs.
    """
    source = random.Random(seed)
    names = itertools.count()
    found, stats = {}, []

    def finish(name):
        found[name] = driver.output(name), driver.logprobs[name]
        driver.finish(name)

    for _ in range(steps):
        while len(driver.tokens) < 4 and source.random() < 0.6:
            name = f"r{next(names)}"
            prompt = [source.randrange(97) for _ in range(source.randint(1, 30))]
            driver.add(name, prompt, drawn(seed))
        running = [name for name in driver.tokens if source.random() < 0.85]
        if running and source.random() < 0.1:
            driver.preempt(running.pop())
        counts, room = {}, 24
        for name in running:
            most = min(driver.left(name), room)
            if most:
                counts[name] = most if source.random() < 0.7 else source.randint(1, most)
                room -= counts[name]
        output = driver.step(counts)
        stats.append(output.graph_stats if counts else None)
        for name in [n for n in driver.tokens if len(driver.output(n)) > 12]:
            finish(name)
    for name in list(driver.tokens):
        finish(name)
    return found, stats


@pytest.fixture
def eager_histories(make_runner, make_driver):
    """seed -> the eager tokens and scores; kept, since all modes ask for them."""

    def run(seed):
        if seed not in EAGER:
            EAGER[seed] = made(seed)
        return EAGER[seed]

    def made(seed):
        runner = make_runner(max_num_seqs=4, max_num_batched_tokens=24)
        runner.warm_up()
        driver = make_driver(runner, rng=random.Random(seed))
        return history(driver, seed)

    return run


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(2))
def test_tokens_and_scores_equal_eager_ones(mode, seed, make_graphs, make_driver, eager_histories):
    runner = make_graphs(mode)
    found, stats = history(make_driver(runner, rng=random.Random(seed)), seed)
    expected, none = eager_histories(seed)
    assert not any(none)
    assert found.keys() == expected.keys()
    for name, (tokens, scores) in expected.items():
        assert found[name][0] == tokens, name
        for one, other in zip(found[name][1], scores, strict=True):
            torch.testing.assert_close(
                torch.tensor(one.values), torch.tensor(other.values), atol=2e-5, rtol=0
            )
    modes = {each.mode for each in stats if each}
    asked = GraphMode.named(mode)
    assert modes >= {asked.decode.name, asked.mixed.name}
    for each in filter(None, stats):
        assert each.padded >= each.unpadded
        assert each.padded == each.unpadded or each.mode != "NONE"


def test_steps_without_graphs_say_nothing_of_them(make_runner, make_driver):
    runner = make_runner()
    runner.warm_up()
    assert runner.graphs is None
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    assert driver.step({"a": 3}).graph_stats is None


def test_a_model_of_l_layers_is_2_l_plus_1_pieces(make_graphs):
    runner = make_graphs("piecewise", sizes=(4, 8))
    for capture in runner.graph_plan.captures():
        graph = runner.graphs.captured.find(capture.mode, capture.key).graph
        assert isinstance(graph, PiecewiseGraph)
        kinds = [type(piece) for piece in graph.pieces]
        assert kinds == [Segment, *[EagerPiece, Segment] * LAYERS]
        assert len(kinds) == 2 * LAYERS + 1
        for piece in graph.pieces[1::2]:
            assert [call.function for call in piece.calls] == [paged.kv_write, paged.attention]


def test_metadata_is_built_for_the_padded_batch(make_graphs, make_driver):
    """Lengths are the padded ones, padding is inert: slot -1, length 0."""
    runner = make_graphs("full", sizes=(8,))
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3, 4])
    driver.add("b", [5])
    seen = []
    build = runner.build_attention

    def spy(inputs, batch=None):
        seen.append((inputs, build(inputs, batch)))
        return seen[-1][1]

    runner.build_attention = spy
    output = driver.step({"a": 4, "b": 1})
    assert (output.graph_stats.unpadded, output.graph_stats.padded) == (5, 8)
    inputs, by_layer = seen[0]
    metadata = next(iter(by_layer.values()))
    assert len(inputs.token_ids) == len(inputs.positions) == 8
    assert metadata.slots.tolist()[5:] == [-1, -1, -1]
    assert (metadata.slots[:5] >= 0).all()
    assert metadata.seq_lens_device.tolist() == [1, 4, 0, 0], "single tokens come first"
    assert metadata.query_start_device.tolist() == [0, 1, 5, 5, 5]
    assert (metadata.block_table[2:] == 0).all()
    assert len(metadata.query_start) == 5


@pytest.mark.parametrize("mode", ["piecewise", "full"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_padding_of_every_amount_changes_nothing(mode, tokens, make_graphs, make_driver):
    prompt = list(range(3, 3 + tokens))
    scores = []
    for sizes in ((tokens,), (8,)):
        driver = make_driver(make_graphs(mode, sizes=sizes))
        driver.add("a", prompt, drawn(1))
        stats = [driver.step({"a": tokens}).graph_stats]
        stats += [driver.step({"a": 1}).graph_stats for _ in range(2)]
        assert stats[0].padded == sizes[0]
        scores.append([row.values for row in driver.logprobs["a"]])
        tables = driver.runner.kv_cache.layers.values()
        assert all((cache.key[0] == 0).all() for cache in tables), "the null block was written"
    torch.testing.assert_close(*map(torch.tensor, scores), atol=2e-5, rtol=0)


def test_warm_up_leaves_nothing_behind(make_runner, make_driver):
    """Generators, requests and the cache are as before, whatever is captured."""
    import numpy as np

    graph = GraphConfig(graph_mode="full_and_piecewise", graph_warm_ups=1)
    runner = make_runner(graph=graph, max_num_seqs=4, max_num_batched_tokens=16)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    runner.warm_up()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert len(runner.graphs.captured) == len(runner.graph_plan.graphs) > 0
    assert all((cache.key == 0).all() for cache in runner.kv_cache.layers.values())
    assert all((cache.value == 0).all() for cache in runner.kv_cache.layers.values())
    assert len(runner.requests) == 0


def test_each_graph_is_made_once_after_its_warm_ups(make_runner):
    """PIECEWISE before FULL, larger first; two eager runs before each; closed afterwards. Before
    all, the largest FULL one runs eagerly for the scratch memory that it needs.
    """
    runs = []

    class Watched(TorchModelRunner):
        def make_forward_context(self, inputs, batch, plan=None):
            runs.append((inputs.dispatch.mode.name, inputs.num_tokens))
            return super().make_forward_context(inputs, batch, plan)

    graph = GraphConfig(graph_mode="full_and_piecewise", graph_sizes=(2, 4), graph_warm_ups=2)
    runner = make_runner(Watched, graph=graph, max_num_seqs=4, max_num_batched_tokens=16)
    runner.warm_up()
    assert runs.pop(0) == ("FULL", 4)
    order = [key for key, _ in itertools.groupby(runs)]
    assert order == [("PIECEWISE", 4), ("PIECEWISE", 2), ("FULL", 4), ("FULL", 2)]
    assert [runs.count(key) for key in order] == [3, 4, 3, 4], "the smallest are rehearsed"
    capture = next(iter(runner.graph_plan.graphs))
    with pytest.raises(LifecycleError, match="captured after warm-up"):
        runner.graphs.captured.add(capture, runner.graphs._capture)


class Watching:
    """A port that notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def capture(self, function, key, *, pool=None, rehearsal=None):
        self.asked.append(("capture", key))
        return super().capture(function, key, pool=pool, rehearsal=rehearsal)

    def before_replay(self, key, metadata):
        self.asked.append(("before", key, metadata))

    def replay(self, graph):
        self.asked.append(("replay", graph))
        return super().replay(graph)


@pytest.fixture
def watched(make_context, platform, registry, device_class):
    def make(mode, sizes):
        graph = GraphConfig(graph_mode=mode, graph_sizes=sizes)
        context = make_context(graph=graph, max_num_seqs=4)
        device = type("WatchingDevice", (Watching, device_class), {})()
        runner = TorchModelRunner(context, platform, registry, device)
        runner.load_model()
        return runner

    return make


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_the_port_hears_of_each_replay_first(mode, watched, make_driver, plan_for):
    runner = watched(mode, (4,))
    runner.initialize_kv_cache(plan_for(runner.get_kv_cache_spec(), 200))
    runner.warm_up()
    graphs = 1 if mode == "full" else LAYERS + 1
    asked = runner.device.asked
    assert [each[0] for each in asked] == ["capture"] * graphs
    key = runner.graph_plan.captures()[0].key
    keys = [each[1] for each in asked]
    assert keys == ([key] if mode == "full" else [(key, 0), (key, 2), (key, 4)])
    asked.clear()
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    assert [each[0] for each in asked] == ["before", "replay"] * graphs
    assert [each[1] for each in asked[::2]] == keys
    for before in asked[::2]:
        assert set(before[2]) == set(runner.kv_cache.layers)
        metadata = next(iter(before[2].values()))
        assert metadata.query_start[1] == 3


class OwnGraphs:
    """A device with graphs of its own, by the least that the port asks for: its graph is the
    function, and what it returned is where its results stay.
    """

    @frozen
    class Graph:
        function: object
        output: object

    def __init__(self):
        super().__init__()
        self.own_pool = object()
        self.captured = self.replayed = 0

    def memory_allocated(self):
        return 0

    def graph_pool(self):
        return self.own_pool

    def capture(self, function, key, *, pool=None, rehearsal=None):
        assert pool is self.own_pool
        self.captured += 1
        return self.Graph(function, function())

    def replay(self, graph):
        self.replayed += 1
        again = graph.function()
        if graph.output is not None:
            graph.output.copy_(again)
        return graph.output


@pytest.mark.parametrize("mode", ["full_decode_only", "piecewise"])
def test_a_device_with_graphs_of_its_own_needs_no_more(
    mode, make_context, platform, registry, plan_for, make_driver, eager_histories, device_class
):
    """FULL is the whole model, PIECEWISE the segments, as functions over static memory."""
    context = make_context(
        graph=GraphConfig(graph_mode=mode), max_num_seqs=4, max_num_batched_tokens=24
    )
    device = type("OwnDevice", (OwnGraphs, device_class), {})()
    runner = TorchModelRunner(context, platform, registry, device)
    runner.load_model()
    runner.initialize_kv_cache(plan_for(runner.get_kv_cache_spec(), 200))
    runner.warm_up()
    pieces = LAYERS + 1 if mode == "piecewise" else 1
    assert runner.device.captured == len(runner.graphs.captured) * pieces
    found, stats = history(make_driver(runner, rng=random.Random(1)), 1)
    assert {name: each[0] for name, each in found.items()} == {
        name: each[0] for name, each in eager_histories(1)[0].items()
    }
    assert runner.device.replayed == pieces * sum(1 for s in stats if s and s.mode != "NONE") > 0


# Steps that end early, caches with rubbish in them, copies.


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_cancelled_step_does_not_replay(mode, make_graphs, make_driver):
    ended = []
    runner = make_graphs(mode, sizes=(4,), cancelled=lambda: bool(ended))
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    ended.append(True)
    with pytest.raises(CancelledStepError):
        driver.step({"a": 1})


def test_a_step_is_cancelled_between_pieces(make_graphs, make_driver):
    asked = []
    runner = make_graphs("piecewise", sizes=(4,), cancelled=lambda: len(asked) > 1)
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    graph = next(iter(runner.graphs.captured._graphs.values())).graph
    segments = []
    replay = runner.device.replay

    def counting(graph):
        asked.append(graph)
        segments.append(graph)
        return replay(graph)

    runner.device.replay = counting
    with pytest.raises(CancelledStepError):
        driver.step({"a": 3})
    assert len(segments) == 2 < len(graph.pieces)


@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_rubbish_in_fresh_blocks_is_zeroed_and_never_read(mode, make_graphs, make_driver):
    """Blocks full of NaN: those that a step zeroes are clean, and so are tokens and scores."""
    prompt = [5, 9, 3, 1, 8]
    runner = make_graphs(mode)
    for cache in runner.kv_cache.layers.values():
        cache.key[1:], cache.value[1:] = torch.nan, torch.nan
    driver = make_driver(runner)
    driver.add("a", prompt, drawn(4))
    plan = driver.plan({"a": 5})
    fresh = plan.new[0].block_ids[0]
    plan = evolve(plan, blocks_to_zero=fresh)
    driver.take(plan, runner.execute_model(plan))
    for cache in runner.kv_cache.layers.values():
        assert (cache.key[fresh[-1], 1:] == 0).all(), "zeroed before it was written"
        assert not torch.isnan(cache.key[list(fresh)]).any()
    for _ in range(6):
        assert not driver.step({"a": 1}).nan_counts
    clean = make_driver(make_graphs("none"))
    clean.add("a", prompt, drawn(4))
    clean.run(7)
    assert driver.output("a") == clean.output("a")


@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_both_children_of_a_fork_go_on_as_one_would(mode, make_graphs, make_driver):
    """The second child's blocks are copied from the first's in the step that it begins with."""
    runner = make_graphs(mode)
    driver = make_driver(runner)
    prompt = [4, 8, 2, 6, 1, 7]
    driver.add("first", prompt, drawn(2))
    driver.step({"first": 6})
    driver.add("second", [*prompt, *driver.output("first")], drawn(2))
    driver.computed["second"] = 6
    driver.num_prompt["second"] = 7
    plan = driver.plan({"first": 1, "second": 1})
    copies = zip(driver.blocks["first"], driver.blocks["second"], strict=True)
    plan = evolve(plan, block_copies=tuple((0, source, target) for source, target in copies))
    driver.take(plan, runner.execute_model(plan))
    for _ in range(5):
        driver.step({"first": 1, "second": 1})
    assert driver.output("first")[1:] == driver.output("second")
    alone = make_driver(make_graphs("none"))
    alone.add("first", prompt, drawn(2))
    alone.run(7)
    assert driver.output("first") == alone.output("first")


# What cannot be captured.


def reads_on_the_host(query, key_cache, value_cache, metadata, *, scale, **options):
    longest = int(metadata.seq_lens_device.max())
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale) * (longest > 0)


def depends_on_host_lengths(query, key_cache, value_cache, metadata, *, scale, **options):
    return query * metadata.seq_lens[0]


def depends_on_data(query, key_cache, value_cache, metadata, *, scale, **options):
    rows = metadata.seq_lens_device.nonzero()
    return query * rows.shape[0]


def keeps_a_derived_tensor(query, key_cache, value_cache, metadata, *, scale, **options):
    lengths = metadata.derive("host lengths", lambda step: made_outside[step.seq_lens[0]])
    return query * lengths


made_outside = {length: torch.tensor(float(length)) for length in range(300)}

for each in (reads_on_the_host, depends_on_host_lengths, depends_on_data, keeps_a_derived_tensor):
    graph_support(AttentionSupport.ALWAYS)(each)


def undeclared(query, key_cache, value_cache, metadata, *, scale, **options):
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale, **options)


@graph_support(AttentionSupport.SINGLE_TOKEN_DECODE)
def of_single_tokens(query, key_cache, value_cache, metadata, *, scale, **options):
    return paged.attention(query, key_cache, value_cache, metadata, scale=scale, **options)


def offered(registry, function):
    reference = f"{__name__}:{function.__name__}"
    registry.given["hardpoint_operations"] = [
        Offer(name="attention", platform="host", reference=reference)
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (reads_on_the_host, "the host reads a tensor"),
        (depends_on_data, "the shape of a result depends on data"),
        (depends_on_host_lengths, "depends on what the host knows of a batch"),
        (keeps_a_derived_tensor, "depends on what the host knows of a batch"),
    ],
)
def test_attention_that_only_claims_to_be_fixed_is_a_named_error(
    function, message, registry, make_graphs
):
    offered(registry, function)
    with pytest.raises(GraphCaptureError, match=message):
        make_graphs("full", sizes=(4,), registry=registry)


@pytest.mark.parametrize("function", [reads_on_the_host, depends_on_host_lengths])
def test_in_pieces_attention_may_do_as_it_likes(function, registry, make_graphs, make_driver):
    offered(registry, function)
    driver = make_driver(make_graphs("piecewise", sizes=(4,), registry=registry))
    driver.add("a", [1, 2, 3])
    assert driver.step({"a": 3}).graph_stats.mode == "PIECEWISE"


def test_in_pieces_attention_knows_a_batch_by_its_metadata_only(make_runner):
    """Any other argument is the same at each replay: one of a batch is a named error."""

    class Telling(TorchModelRunner):
        def make_model(self, operations):
            def attention(*args, **options):
                lengths = args[3].seq_lens
                return operations.attention(*args, **options, longest=max(lengths))

            return super().make_model(evolve(operations, attention=attention))

        def make_operations(self):
            def attention(*args, longest, **options):
                return paged.attention(*args, **options)

            return evolve(super().make_operations(), attention=attention)

    graph = GraphConfig(graph_mode="piecewise", graph_sizes=(4,), graph_warm_ups=0)
    runner = make_runner(Telling, graph=graph, max_num_seqs=4)
    with pytest.raises(GraphCaptureError, match=r"host knows of a batch.*attention, gets 1, then"):
        runner.warm_up()


def test_the_mode_is_what_attention_supports(registry, make_runner):
    def plan(function, mode, **more):
        offered(registry, function)
        runner = make_runner(
            registry=registry, graph=GraphConfig(graph_mode=mode), max_num_seqs=4, **more
        )
        return runner.graph_plan.mode

    assert plan(undeclared, "piecewise") is GraphMode.PIECEWISE
    assert plan(undeclared, "full") is GraphMode.PIECEWISE
    assert plan(of_single_tokens, "full") is GraphMode.FULL_AND_PIECEWISE
    assert plan(of_single_tokens, "full_decode_only") is GraphMode.FULL_DECODE_ONLY
    with pytest.raises(ConfigError, match="graph_mode = 'full' cannot be honoured"):
        plan(undeclared, "full", origins={"graph_mode": "a test"})


def test_a_device_names_the_mode_where_the_user_names_none(
    make_context, platform, registry, device_class
):
    class Graphic(device_class):
        default_graph_mode = "full_decode_only"

    context = make_context(max_num_seqs=4, graph=GraphConfig())
    runner = TorchModelRunner(context, platform, registry, Graphic())
    runner.load_model()
    assert runner.graph_plan.mode is GraphMode.FULL_DECODE_ONLY
    context = make_context(max_num_seqs=4, graph=GraphConfig(graph_mode="none"))
    runner = TorchModelRunner(context, platform, registry, Graphic())
    runner.load_model()
    assert runner.graph_plan.mode is GraphMode.NONE


def test_a_context_says_which_graph_it_runs_in(make_graphs, make_driver):
    runner = make_graphs("full_decode_only", sizes=(4,))
    seen = []
    make = runner.make_forward_context

    def spy(inputs, batch, plan=None):
        seen.append(make(inputs, batch, plan))
        return seen[-1]

    runner.make_forward_context = spy
    driver = make_driver(runner)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    driver.step({"a": 1})
    eager, decode = seen
    assert (eager.graph_mode, eager.batch_key, eager.num_tokens) == ("NONE", None, 3)
    key = next(iter(runner.graph_plan.graphs)).key
    assert (decode.graph_mode, decode.batch_key, decode.num_tokens) == ("FULL", key, 1)
    assert decode.workspace is runner.workspace
    assert runner.workspace.locked


def test_plans_have_captures_of_every_kind(make_graphs):
    runner = make_graphs("full_and_piecewise", sizes=(2, 4))
    kinds = {(c.mode, c.key.num_tokens, c.key.uniform) for c in runner.graph_plan.graphs}
    assert kinds == {
        (GraphMode.FULL, 2, True),
        (GraphMode.FULL, 4, True),
        (GraphMode.PIECEWISE, 2, False),
        (GraphMode.PIECEWISE, 4, False),
    }
    assert all(isinstance(each, Capture) for each in runner.graph_plan.captures())
