"""Custom logits processors: what they hear, when they are applied, and whose rows they see."""

from __future__ import annotations

import random

import pytest
import torch
from hardpoint.config.schema import Config, SamplingConfig, SpeculativeConfig
from hardpoint.errors import InvalidRequestError
from hardpoint.logits_processor import LogitsProcessor, LogitsProcessorError
from hardpoint.records import Offer
from hardpoint.references import UnresolvedReferenceError, WrongClassError
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.batch.columns import Column
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hardpoint_runtime.sampling.processors import Processors
from hardpoint_runtime.sampling.sampler import Sampler

GREEDY = SamplingParams(temperature=0, max_tokens=None)


class NoThirteen(LogitsProcessor):
    def apply(self, logits, rows):
        logits[:, 13] = -torch.inf


class Bans(LogitsProcessor):
    """Bans the id that a request names in ``extra_args``, from what it keeps for each slot."""

    def __init__(self, config):
        super().__init__(config)
        self.banned = {}

    @classmethod
    def check(cls, sampling):
        if not isinstance(sampling.extra_args.get("ban", 0), int):
            raise InvalidRequestError("ban must be an id", field="extra_args", value=None)

    def update(self, changes):
        for slot in changes.removed:
            del self.banned[slot]
        for request in changes.added:
            assert request.slot not in self.banned
            wish = (request.sampling.extra_args or {}).get("ban")
            self.banned[request.slot] = (request.req_id, request.prompt, wish)

    def apply(self, logits, rows):
        for row, slot in enumerate(rows.slots):
            req_id, _, wish = self.banned[slot]
            assert req_id == rows.req_ids[row]
            if wish is not None:
                logits[row, wish] = -torch.inf


def sample(processors, requests, names, logits):
    batch = build_sampling_batch(
        requests, names, vocab_size=logits.shape[1], processors=processors.begin(names)
    )
    return Sampler(HostDeviceOps()).sample(logits, batch)


@pytest.fixture
def make(make_requests):
    def start(*classes):
        requests = make_requests({})
        return requests, Processors([made(Config()) for made in classes], requests)

    return start


def add(requests, name, sampling=GREEDY, prompt=(1,)):
    from hardpoint.messages import NewRequestData

    if sampling.seed is None:
        sampling = sampling.with_seed(0)
    requests.add(NewRequestData(req_id=name, prompt=prompt, sampling=sampling, block_ids=()))


def test_a_banned_id_never_appears(make):
    requests, processors = make(NoThirteen)
    logits = torch.zeros(3, 20)
    logits[:, 13] = 9.0
    for index, name in enumerate("abc"):
        add(requests, name, GREEDY if index else SamplingParams(seed=1))
    for _ in range(20):
        found = sample(processors, requests, ["c", "a", "b"], logits)
        assert 13 not in found.tokens
        for name, token in zip("cab", found.tokens, strict=True):
            requests.append_token(name, token)


def test_after_a_thousand_edits_each_row_has_its_own_state(make):
    """Requests come, go, and take slots that others left; each step samples some, in any order."""
    rng = random.Random(1)
    requests, processors = make(Bans)
    alive, born = {}, 0
    edits = 0
    while edits < 1000:
        for _ in range(rng.randrange(4)):
            edits += 1
            if alive and rng.random() < 0.5:
                name = rng.choice(sorted(alive))
                requests.forget([name])
                del alive[name]
            else:
                name, born = f"r{born}", born + 1
                ban = rng.choice([None, *range(5)])
                extra = {} if ban is None else {"extra_args": {"ban": ban}}
                add(requests, name, SamplingParams(temperature=0, **extra))
                alive[name] = ban
        names = rng.sample(sorted(alive), rng.randrange(len(alive) + 1))
        if names:
            logits = torch.arange(5.0).flip(0).repeat(len(names), 1)
            tokens = sample(processors, requests, names, logits).tokens
            assert list(tokens) == [1 if alive[name] == 0 else 0 for name in names]


def test_what_came_and_went_between_two_steps_is_not_mentioned(make):
    requests, processors = make(Bans)
    heard = []
    bans = processors._changing[0]
    bans.update = heard.append
    add(requests, "a")
    requests.forget(["a"])
    add(requests, "b")
    bans.apply = lambda logits, rows: None
    sample(processors, requests, ["b"], torch.zeros(1, 5))
    requests.forget(["b"])
    add(requests, "c")
    add(requests, "d")
    sample(processors, requests, ["d"], torch.zeros(1, 5))
    sample(processors, requests, ["d"], torch.zeros(1, 5))
    assert [(each.removed, [r.req_id for r in each.added]) for each in heard] == [
        ((), ["b"]), ((0,), ["c", "d"]),
    ]  # fmt: skip


class Seen(LogitsProcessor):
    """Notes the logits that it gets."""

    def __init__(self, config):
        super().__init__(config)
        self.rows = []

    def apply(self, logits, rows):
        self.rows.append((rows.req_ids, [list(rows.output(i)) for i in range(len(rows.req_ids))]))
        self.logits = logits.clone()


class SeenLate(Seen):
    argmax_invariant = True

    def apply(self, logits, rows):
        super().apply(logits, rows)
        logits[:] = torch.where(logits < 0, -torch.inf, 50.0)  # only the best is left


def test_the_order_of_the_stages(make):
    """Bias before, penalties after; those that leave the best alone see drawn rows, heated ones."""
    requests, processors = make(Seen, SeenLate)
    more = {"logit_bias": {2: 3.0}, "presence_penalty": 2.0, "max_tokens": None}
    add(requests, "greedy", SamplingParams(temperature=0, **more))
    add(requests, "drawn", SamplingParams(temperature=0.5, seed=3, **more))
    for name in ("greedy", "drawn"):
        requests.append_token(name, 4)
    early, late = processors._changing[0], processors._refining[0]
    for _ in range(8):
        found = sample(processors, requests, ["greedy", "drawn"], torch.zeros(2, 6))
        assert found.tokens == (2, 2)
    assert early.rows[0] == (("greedy", "drawn"), [[4], [4]])
    assert early.logits.tolist() == [[0, 0, 3, 0, 0, 0]] * 2
    assert late.rows[0] == (("drawn",), [[4]])
    assert late.logits.tolist() == [[-6, -6, 0, -6, -10, -6]]


def test_a_column_of_a_plugin_is_read_in_a_processor():
    """Declared once (dtype, shape, default, pad), read by name in row order."""
    from hardpoint.kv_cache import KVCacheConfig
    from hardpoint_runtime.batch.block_table import BlockTables
    from hardpoint_runtime.batch.requests import Requests, make_columns
    from hardpoint_runtime.sampling.columns import SAMPLING_COLUMNS

    column = Column(
        name="house_scale", dtype="float32", shape=(2,), default=(1.0, 0.0), pad=(1.0, 0.0),
        read=lambda new: (new.sampling.extra_args or {}).get("scale"),
    )  # fmt: skip

    class Scales(LogitsProcessor):
        def apply(self, logits, rows):
            scale = torch.from_numpy(rows.column("house_scale"))
            logits.mul_(scale[:, :1]).add_(scale[:, 1:])

    columns = make_columns(64, 2, (*SAMPLING_COLUMNS, column))
    plan = KVCacheConfig(num_blocks=1, groups=(), tensors=())
    requests = Requests(columns, BlockTables(columns, plan, max_model_len=64), 64)
    processors = Processors([Scales(Config())], requests)
    rng, alive = random.Random(2), {}
    for step in range(200):
        if alive and rng.random() < 0.4:
            gone = rng.choice(sorted(alive))
            requests.forget([gone])
            del alive[gone]
        name, scale = f"r{step}", rng.choice([None, (-1.0, 2.0), (2.0, 0.0)])
        extra = {} if scale is None else {"extra_args": {"scale": scale}}
        add(requests, name, SamplingParams(temperature=0, **extra))
        alive[name] = scale
        names = rng.sample(sorted(alive), len(alive))
        tokens = sample(processors, requests, names, torch.arange(4.0).repeat(len(names), 1)).tokens
        assert list(tokens) == [0 if alive[each] == (-1.0, 2.0) else 3 for each in names]


class Broken(LogitsProcessor):
    def apply(self, logits, rows):
        raise ValueError("no")


class Returning(LogitsProcessor):
    def apply(self, logits, rows):
        return logits + 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Broken, r"Broken raised in apply: ValueError: no"),
        (Returning, r"Returning returned a Tensor from apply; it must change in place"),
    ],
)
def test_a_processor_that_does_wrong_is_named(make, kind, words):
    requests, processors = make(kind)
    add(requests, "a")
    with pytest.raises(LogitsProcessorError, match=words):
        sample(processors, requests, ["a"], torch.zeros(1, 5))


class Site:
    """A registry with offers."""

    name = "host"

    def __init__(self, **references):
        self.references = references

    def offers(self, hook, platform, description=None):
        assert (hook, platform) == ("hardpoint_logits_processors", "host")
        return {n: Offer(name=n, reference=r) for n, r in self.references.items()}


def load(make_requests, site, *configured, drafts=0):
    config = Config(
        sampling=SamplingConfig(logits_processors=configured),
        speculative=SpeculativeConfig(num_speculative_tokens=drafts),
    )
    return Processors.load(config, site, site, make_requests({}))


def test_they_come_from_plugins_references_and_objects(make_requests):
    site = Site(b="hardpoint.logits_processor:LogitsProcessor")
    with pytest.raises(WrongClassError, match="lacks apply"):
        load(make_requests, site)
    with pytest.raises(UnresolvedReferenceError, match=r"house\.none"):
        load(make_requests, Site(), "house.none:Nothing")
    with pytest.raises(WrongClassError, match="not a subclass"):
        load(make_requests, Site(), int)
    found = load(make_requests, Site(), NoThirteen, Bans, SeenLate)
    assert [type(each) for each in found._changing] == [NoThirteen, Bans]
    assert [type(each) for each in found._refining] == [SeenLate]
    assert load(make_requests, Site()).begin([]) is None


def test_those_of_plugins_are_left_out_where_drafts_are_judged(make_requests):
    site = Site(b="house.none:Nothing")
    with pytest.raises(UnresolvedReferenceError):
        load(make_requests, site)
    assert load(make_requests, site, drafts=2).begin([]) is None
