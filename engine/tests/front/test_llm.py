"""The front over a whole engine on the dummy platform: texts in, texts out, and nothing leaks."""

from __future__ import annotations

import _thread
import itertools
import os
import threading
from collections.abc import Iterator

import hardpoint_engine
import psutil
import pytest
from hardpoint.config.loading import load_config
from hardpoint.errors import (
    CheckpointError,
    ConfigError,
    HardpointError,
    InvalidRequestError,
    RemoteError,
)
from hardpoint_engine import LLM, SamplingParams, front

SHORT = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=64)


def start(**keys) -> LLM:
    return LLM(**{"platform": "dummy", "load_format": "dummy", "max_model_len": 256} | keys)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with start() as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return ["one", "two 🙂", "three, longer than a block of sixteen tokens", "four"]


def ids(results) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_public_names_are_listed_and_there():
    assert set(hardpoint_engine.__all__) <= set(dir(hardpoint_engine))
    for name in hardpoint_engine.__all__:
        assert getattr(hardpoint_engine, name) is not None


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "x"}, 3, ["hello"]])
def test_what_is_no_conversation_is_told_what_one_looks_like(llm, messages):
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat(messages, SHORT)
    assert str(caught.value).startswith('messages must be a list of {"role": "user", "content"')


def test_texts_and_ids_are_the_same_prompt(llm, prompts):
    by_text = llm.generate(prompts, SHORT)
    by_ids = llm.generate([list(text.encode()) for text in prompts], SHORT)
    assert ids(by_text) == ids(by_ids)
    assert [result.prompt for result in by_text] == prompts
    assert [result.prompt for result in by_ids] == [None] * 4
    for text, result in zip(prompts, by_text, strict=True):
        answer = result.outputs[0]
        assert result.prompt_token_ids == list(text.encode())
        assert result.finished
        assert len(answer.token_ids) == 8
        assert answer.text == bytes(answer.token_ids).decode(errors="replace")
        assert answer.finish_reason == "length"
        assert answer.logprobs is None
        assert result.metrics.num_generation_tokens == 8


def test_one_prompt_is_a_list_of_one_result(llm):
    assert ids(llm.generate("one", SHORT)) == ids(llm.generate([111, 110, 101], SHORT))
    assert llm.generate([], SHORT) == []


def test_parameters_may_differ_by_prompt(llm):
    few, more = llm.generate(["a", "a"], [SHORT, LONG])
    assert (len(few.outputs[0].token_ids), len(more.outputs[0].token_ids)) == (8, 64)
    assert more.outputs[0].token_ids[:8] == few.outputs[0].token_ids


def test_a_stream_grows_by_its_end_and_ends_as_generate_does(llm):
    seen = list(llm.stream("one", LONG))
    tokens = [result.outputs[0].token_ids for result in seen]
    texts = [result.outputs[0].text for result in seen]
    for before, after in itertools.pairwise(tokens):
        assert after[: len(before)] == before
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before)
    assert [result.finished for result in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen) == 64
    assert tokens[-1] == ids(llm.generate("one", LONG))[0]


def test_streams_are_computed_together(llm, prompts):
    streams = [llm.stream(text, LONG) for text in prompts]
    for _ in streams[0]:
        pass
    rest = [list(stream) for stream in streams[1:]]
    assert [len(results) for results in rest] == [1, 1, 1]  # all was there already
    expected = ids(llm.generate(prompts[1:], LONG))
    assert [results[-1].outputs[0].token_ids for results in rest] == expected


@pytest.mark.parametrize("way", ["drop", "close", "with", "abort"])
def test_a_stream_that_is_left_is_aborted(llm, way):
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    if way == "drop":
        del stream
    elif way == "close":
        stream.close()
        stream.close()
    elif way == "with":
        with stream:
            next(stream)
    else:
        llm.abort(stream.request_id)
        assert [result.outputs[0].finish_reason for result in stream] == ["abort"]
        llm.abort(stream.request_id)
    llm.abort("never heard of")
    before = llm.metrics.generated_tokens
    llm.generate("x", SHORT)
    assert llm.metrics.generated_tokens - before == 8
    assert not llm.core.has_unfinished()


def test_a_stop_string_ends_the_request_in_the_engine_too(llm):
    whole = llm.generate("one", LONG)[0].outputs[0]
    stop = whole.text[10:13]
    cut = whole.text.index(stop)
    before = llm.metrics.generated_tokens
    result = llm.generate("one", SamplingParams(temperature=0, max_tokens=64, stop=stop))[0]
    answer = result.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == whole.text[:cut]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert llm.metrics.generated_tokens - before == len(answer.token_ids) < 64
    assert not llm.core.has_unfinished()


def test_several_answers_to_one_prompt(llm):
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, n=3)
    (result,) = llm.generate("one", params)
    answers = [answer.token_ids for answer in result.outputs]
    assert [answer.index for answer in result.outputs] == [0, 1, 2]
    assert len(set(map(tuple, answers))) == 3
    seeded = [SamplingParams(temperature=1, seed=seed, max_tokens=8) for seed in (3, 4, 5)]
    assert ids(llm.generate(["one"] * 3, seeded)) == answers


def test_scores_are_given_as_asked(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=2),
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=1),
    ]
    first, second, third = llm.generate(["one", "two", "three"], params)
    answer = first.outputs[0]
    for token, scores in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(scores)) == token
        assert scores[token].rank == 1
        assert len(scores) == 2
    assert second.outputs[0].logprobs is None
    assert [len(scores) for scores in third.outputs[0].logprobs] == [1] * 4
    assert third.prompt_logprobs[0] is None
    assert len(third.prompt_logprobs) == 5
    assert first.prompt_logprobs is None


@pytest.mark.parametrize(
    ("bad", "params", "words"),
    [
        ("", SHORT, "prompt 2 of 3: the prompt is empty"),
        ([999], SHORT, "prompt 2 of 3: token 0 of the prompt is 999"),
        ("x" * 300, SHORT, "prompt 2 of 3: .*context"),
        ("a\udcff", SHORT, "prompt 2 of 3: .*Unicode"),
        ("a", SamplingParams(stop_token_ids=[256]), "prompt 2 of 3: stop_token_ids .*256 tokens"),
        ("a", SamplingParams(bad_words=["x"]), "prompt 2 of 3: .*bad_words"),
    ],
)
def test_a_malformed_request_fails_alone(llm, bad, params, words):
    """A neighbour that is running gives the same tokens, by the same worker, and nothing is left
    behind.
    """
    expected = ids(llm.generate("one", LONG))[0]
    worker = llm.collective_rpc(lambda worker: (os.getpid(), id(worker)))
    before = llm.metrics.generated_tokens
    neighbour = llm.stream("one", LONG)
    next(neighbour)
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(["a", bad, "b"], [SHORT, params, SHORT])
    *_, last = neighbour
    assert last.outputs[0].token_ids == expected
    assert llm.metrics.generated_tokens - before == 64  # none of the other prompts was computed
    assert llm.collective_rpc(lambda worker: (os.getpid(), id(worker))) == worker
    assert not llm.core.has_unfinished()


def test_conversations_need_a_template_and_words(llm):
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.chat([{"role": "user", "content": ""}], SHORT)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], SHORT)


def test_conversations_go_through_the_template(trained, tmp_path):
    """The tokenizer of a folder with a template, over the dummy's own shape."""
    import json

    trained.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with start(tokenizer=str(tmp_path)) as llm:
        texts = ["!", "!!"]
        chats = llm.chat([[{"role": "user", "content": text}] for text in texts], SHORT)
        raw = llm.generate([f"{text}<|end|>" for text in texts], SHORT)
        assert ids(chats) == ids(raw)
        assert [result.prompt for result in chats] == ["!<|end|>", "!!<|end|>"]
        assert chats[0].prompt_token_ids[-1] == 0
        (one,) = llm.chat([{"role": "user", "content": "!"}], SHORT)
        *_, streamed = llm.stream_chat([{"role": "user", "content": "!"}], SHORT)
        assert ids([one]) == ids([streamed]) == ids(chats[:1])


def test_a_step_that_fails_fails_its_requests_once_and_the_engine_goes_on():
    with start(plugins={"dummy": {"fail_at": "step:3"}}) as llm:
        with pytest.raises(HardpointError):
            llm.generate(["one", "two"], SHORT)
        assert not llm.core.has_unfinished()
        with start() as other:
            expected = ids(other.generate(["one", "two"], SHORT))
        assert ids(llm.generate(["one", "two"], SHORT)) == expected


def test_a_stream_raises_what_it_failed_by():
    with start(plugins={"dummy": {"fail_at": "step:3"}}) as llm:
        stream = llm.stream("one", SHORT)
        with pytest.raises(HardpointError):
            list(stream)
        assert list(stream) == []


def test_an_interrupt_ends_the_call_alone():
    """As Ctrl-C does in a script that catches it: the step in flight is finished, its requests are
    dropped, and what comes next is right.
    """
    with start(plugins={"dummy": {"step_seconds": 0.05}}) as llm:
        expected = ids(llm.generate("two", SHORT))
        timer = threading.Timer(0.2, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("one", SamplingParams(temperature=0, max_tokens=200))
        timer.join()
        before = llm.metrics.generated_tokens
        assert ids(llm.generate("two", SHORT)) == expected
        assert llm.metrics.generated_tokens - before <= 9  # the step in flight, and these
        assert not llm.core.has_unfinished()


def test_several_threads_share_the_engine(llm, prompts):
    expected = [ids(llm.generate(text, LONG))[0] for text in prompts]
    found: dict[int, list[int]] = {}
    begin = threading.Barrier(len(prompts))

    def work(index: int) -> None:
        begin.wait()
        for _ in range(3):
            found[index] = ids(llm.generate(prompts[index], LONG))[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(prompts))] == expected


def test_it_says_what_it_is_and_calls_workers(llm):
    assert llm.platform.name == "dummy"
    assert llm.executor.world_size == 1
    assert llm.description.vocab_size == 256
    assert llm.config.scheduler.max_num_seqs is not None
    assert llm.collective_rpc(lambda worker, more: worker.rank + more, args=(5,)) == [5]


def test_shutdown_is_final_and_idempotent():
    llm = start()
    stream = llm.stream("one", LONG)
    next(stream)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(HardpointError, match="shut down"):
        llm.generate("one", SHORT)
    with pytest.raises(HardpointError, match="shut down"):
        list(stream)


def workers() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.is_alive()}


def test_a_tokenizer_that_cannot_be_read_leaves_nothing_running(monkeypatch):
    before = workers()
    error = CheckpointError("no good")

    def fail(source):
        raise error

    monkeypatch.setattr(front, "load_tokenizer", fail)
    with pytest.raises(CheckpointError, match="no good"):
        start()
    assert workers() <= before


def test_an_engine_that_does_not_start_leaves_nothing_running():
    before = workers()
    with pytest.raises((RemoteError, HardpointError)):
        start(plugins={"dummy": {"fail_at": "load"}})
    with pytest.raises(ConfigError, match=r"max_num_seq.*max_num_seqs"):
        start(max_num_seq=3)
    assert workers() <= before


def children() -> set[int]:
    """The processes that this one has started and not yet buried."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("fails", [True, False])
def test_the_process_of_the_template_ends_with_the_engine(trained, tmp_path, fails):
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    before = children()
    keys = {"platform": "dummy", "load_format": "dummy", "tokenizer": str(tmp_path)}
    faults = {"plugins": {"dummy": {"fail_at": "load", "load_seconds": 1}}} if fails else {}
    config = load_config(overrides={**keys, **faults}, environ={})
    if fails:
        with pytest.raises(HardpointError):
            LLM.from_config(config, chat=True)
    else:
        with LLM.from_config(config, chat=True) as llm:
            assert len(children() - before) == 1
            assert llm.chat([{"role": "user", "content": "!"}], SHORT)
            assert len(children() - before) == 1
    assert not children() - before


def test_two_engines_in_one_process_do_not_meet(llm):
    with start(seed=1) as other:
        assert ids(llm.generate("one", SHORT)) == ids(other.generate("one", SHORT))
        assert other.metrics.generated_tokens == 8


def test_a_system_message_tools_and_values_reach_the_template(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ mood }}"
    )
    one = [{"role": "user", "content": "!"}]
    with start(tokenizer=str(tmp_path)) as llm:

        def prompts(messages, **more) -> list[str | None]:
            return [result.prompt for result in llm.chat(messages, SHORT, **more)]

        assert prompts(one) == ["u!"]
        assert prompts([one, one], system="?") == ["s?u!"] * 2
        assert one == [{"role": "user", "content": "!"}]
        tools = [{"type": "function", "function": {"name": "look"}}]
        assert prompts(one, tools=tools, chat_template_kwargs={"mood": "+"}) == ["u!look+"]
        assert prompts(one, chat_template="{{ messages[0].content * 3 }}") == ["!!!"]
        *_, streamed = llm.stream_chat(one, SHORT, system="?", tools=tools)
        assert streamed.prompt == "s?u!look"
        with pytest.raises(InvalidRequestError, match=r"prompt 2 of 2: .*begins with a system"):
            prompts([one, [{"role": "system", "content": "a"}, *one]], system="?")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
        with pytest.raises(InvalidRequestError, match="'tools', which is an argument of its own"):
            prompts(one, chat_template_kwargs={"tools": []})
        with pytest.raises(TypeError, match=r"no keyword 'sytem'\. Did you mean 'system'"):
            prompts(one, sytem="?")
        with pytest.raises(InvalidRequestError, match="cannot be rendered"):
            prompts(one, chat_template="{{ ''.__class__.__mro__ }}{{ 1 / 0 }}")
    with start(tokenizer=str(tmp_path)) as llm:
        assert prompts(one) == ["u!"]
        assert prompts(one, tools=tools) == ["with tools"]


def test_a_template_of_one_s_own_needs_none_of_the_model(llm):
    question = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(question, SHORT, chat_template="<{{ messages[0].content }}>")
    assert result.prompt == "<hi>"
