"""Answers of a given form, on the dummy platform: its logits are at random, so that any form comes
from the masks alone.
"""

from __future__ import annotations

import json
import re
import threading

import pytest
from hardpoint.errors import InvalidRequestError, UnsupportedError
from hardpoint_engine import LLM, SamplingParams
from hardpoint_engine.structured.compiler import GrammarCompiler
from hardpoint_engine.structured.grammar import GrammarError
from hardpoint_engine.structured.llguidance_grammar import GrammarMaker, MatchedGrammar
from hardpoint_engine.structured.specification import read_specification
from hardpoint_engine.text.tokenizer_bytes import ByteTokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99},
                  "minItems": 1, "maxItems": 3},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["colour", "sizes", "name"],
    "additionalProperties": False,
}  # fmt: skip
CHOICES = ["yes", "no", "per haps|", "yes, but"]


def start(**keys) -> LLM:
    values = {
        "platform": "dummy", "load_format": "dummy", "max_model_len": 256, "block_size": 4,
        "num_kv_blocks": 200, "seed": 1,
    }  # fmt: skip
    return LLM(**values | keys)


@pytest.fixture(scope="module")
def llm():
    with start() as llm:
        yield llm
    for each in threading.enumerate():
        if "grammar" in each.name:
            each.join(30)
            assert not each.is_alive()


def params(wishes, **more) -> SamplingParams:
    return SamplingParams(
        **{"structured_outputs": wishes, "temperature": 1.0, "max_tokens": 200} | more
    )


def conforms(text: str) -> bool:
    """Whether ``text`` is valid under SCHEMA."""
    value = json.loads(text)
    return (
        list(value) == ["colour", "sizes", "name"]
        and value["colour"] in ("red", "green")
        and 1 <= len(value["sizes"]) <= 3
        and all(type(size) is int and 1 <= size <= 99 for size in value["sizes"])
        and len(value["name"]) <= 6
    )


FORMS = [
    ({"json": SCHEMA}, conforms),
    ({"json": json.dumps(SCHEMA)}, conforms),
    ({"regex": r"[a-f]{3}-\d{2,5}(x|yz)"}, re.compile(r"[a-f]{3}-\d{2,5}(x|yz)").fullmatch),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": 'start: "a" (b | "c") "d"\nb: "b" "b"'}, ("abbd", "acd").__contains__),
]


@pytest.mark.parametrize(("wishes", "valid"), FORMS, ids=[next(iter(form[0])) for form in FORMS])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"n": 3}, {"ignore_eos": True}], ids=str)
def test_every_answer_has_the_form(llm, wishes, valid, more):
    for result in llm.generate(["one", "two, which is longer"], params(wishes, **more)):
        for answer in result.outputs:
            assert valid(answer.text), answer.text
            assert answer.finish_reason == "stop"


def test_a_choice_that_begins_another_may_end_where_the_model_may_end(llm):
    """`yes` is complete only with an end, of which this vocabulary has none: it goes on."""
    (result,) = llm.generate("x", params({"choice": ["yes", "yes, but"]}, temperature=0))
    assert result.outputs[0].text == "yes, but"


def everything(llm):
    """All forms, answers of no form, and what is wrong, at once."""
    mixed = [params(wishes, seed=5) for wishes, _ in FORMS]
    mixed += [params(None, seed=5, max_tokens=99), params(None, temperature=0, max_tokens=99)]
    return [(f"prompt {index}", each) for index, each in enumerate(mixed)]


def texts(results):
    return [result.outputs[0].text for result in results]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"prefill_chunk_size": 5},
        {"num_kv_blocks": 40, "max_model_len": 128},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_an_answer_is_the_same_alone_batched_chunked_and_preempted(llm, keys):
    requests = everything(llm)
    alone = [texts(llm.generate(prompt, each))[0] for prompt, each in requests]
    with start(**keys) as other:
        prompts, mixed = zip(*requests, strict=True)
        assert texts(other.generate(list(prompts), list(mixed))) == alone
        if "num_kv_blocks" in keys:
            assert other.metrics.preemptions


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"json": {"type": "nonsense"}}, "json cannot be made a grammar: Invalid type: nonsense"),
        ({"regex": "a("}, r"regex cannot be made a grammar: .*unclosed group"),
        ({"grammar": "nothing"}, "grammar cannot be made a grammar"),
    ],
)
def test_a_form_that_is_none_is_the_error_of_that_request_alone(llm, wishes, words):
    stream = llm.stream("x", params(wishes))
    neighbour = llm.generate("one", params(None, temperature=0, max_tokens=8))
    assert len(neighbour[0].outputs[0].token_ids) == 8
    with pytest.raises(InvalidRequestError, match=words):
        list(stream)
    assert not llm.core.has_unfinished()


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({}, "must name exactly one of json, .* not nothing"),
        ({"json": {}, "regex": "a"}, "not json, regex"),
        ({"xml": "a"}, "'xml': is none of json"),
        ({"json": "{"}, "json must be a JSON schema: "),
        ({"json": [1]}, "json must be a JSON schema, a mapping"),
        ({"json": True}, "= True: json must be a JSON schema, .* json_object"),
        ({"json": "false"}, "= False: json must be a JSON schema, .* json_object"),
        ({"json": {"a": {1, 2}}}, "json must be plain data"),
        ({"json_object": 1}, "json_object must be True"),
        ({"regex": ""}, "non-empty text"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must be a list"),
        ({"regex": "a" * ((1 << 20) + 1)}, "1048577 characters"),
    ],
)
def test_what_is_wrong_at_sight_is_refused_before_anything_is_queued(llm, wishes, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        llm.generate("x", params(wishes))
    assert caught.value.field == "structured_outputs"


def test_a_form_and_parameters_that_contradict_each_other_end_a_request_alone(llm):
    """Named are those that left no token; where the end is all that is left, it comes."""
    nothing = params({"choice": ["yes"]}, allowed_token_ids=[ord("x")])
    early = params({"choice": ["yes"]}, min_tokens=50, allowed_token_ids=[*b"yes", 0])
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids.*structured_outputs"):
        llm.generate("a", nothing)
    streams = [llm.stream("a", each) for each in (nothing, early)]
    with pytest.raises(InvalidRequestError):
        list(streams[0])
    assert list(streams[1])[-1].outputs[0].text == "yes"


def test_others_go_on_while_a_grammar_is_compiled(llm, monkeypatch):
    """The compiler stands still until the neighbour is done; aborted, a request waits no longer."""
    go_on = threading.Event()
    make = GrammarMaker.make

    def held(maker, wanted):
        assert go_on.wait(30)
        return make(maker, wanted)

    monkeypatch.setattr(GrammarMaker, "make", held)
    with llm.stream("x", params({"regex": "held[ab]{4}"})) as waiting:
        dropped = llm.stream("x", params({"regex": "dropped"}))
        (neighbour,) = llm.generate("one", params(None, max_tokens=8))
        assert neighbour.finished
        llm.abort(dropped.request_id)
        assert next(dropped).outputs[0].finish_reason == "abort"
        assert len(llm.core.scheduler.roster) == 1
        go_on.set()
        *_, last = waiting
    assert re.fullmatch("held[ab]{4}", last.outputs[0].text)


@pytest.mark.parametrize("method", ["mask", "accept"])
def test_a_grammar_that_fails_in_the_middle_ends_its_answer_alone(llm, monkeypatch, method):
    wishes, calls = {"regex": "fails[ab]{40}"}, []
    whole = getattr(MatchedGrammar, method)

    def failing(grammar, *args):
        calls.append(grammar)
        if calls.count(calls[0]) > 7 and grammar is calls[0]:
            raise GrammarError("it grew too complex")
        return whole(grammar, *args)

    monkeypatch.setattr(MatchedGrammar, method, failing)
    stream = llm.stream("x", params(wishes))
    next(stream)
    (neighbour,) = llm.generate("one", params({"regex": "goes on[ab]{40}"}))
    assert len(neighbour.outputs[0].text) == 47
    with pytest.raises(GrammarError, match="too complex"):
        list(stream)
    assert not llm.core.has_unfinished()


def test_equal_forms_are_compiled_once(llm, monkeypatch):
    made = []
    make = GrammarMaker.make
    monkeypatch.setattr(
        GrammarMaker, "make", lambda maker, wanted: made.append(wanted) or make(maker, wanted)
    )
    wishes = {"regex": "once[ab]{4}"}
    results = llm.generate(["one", "two", "three"], params(wishes, n=2))
    assert len({answer.text for result in results for answer in result.outputs}) > 1
    assert made == [read_specification(wishes)]


def test_without_the_library_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compiler = GrammarCompiler(ByteTokenizer(), 256, ())
    with pytest.raises(UnsupportedError, match=r"pip install 'hardpoint-engine\[structured\]'"):
        compiler.compile({"regex": "a"})


@pytest.mark.parametrize("vocab_size", [256, 257, 300])
def test_masks_are_as_long_as_the_vocabulary_needs(vocab_size):
    """Ids without a token are never allowed; every end of the model may end an answer."""
    ends = [0, 7] if vocab_size < 300 else [299]
    maker = GrammarMaker(ByteTokenizer(), vocab_size, ends)
    grammar = maker.make(read_specification({"regex": "ab*"})).start()
    allowed = []
    for token in (97, 98):
        mask = grammar.mask()
        assert len(mask) == -(-vocab_size // 32) * 4
        allowed.append({bit for bit in range(len(mask) * 8) if mask[bit // 8] >> bit % 8 & 1})
        grammar.accept([token])
    assert allowed == [{97}, {98, *ends}]
    assert not grammar.complete
    assert maker.make(read_specification({"regex": "ab*"})).start().mask() != grammar.mask()
