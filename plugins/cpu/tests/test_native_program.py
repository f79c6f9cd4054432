"""Steps as a native program beside torch's way, through whole engines: the same tokens, however the
work is cut up; what the program does not do is done by torch, and said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from hardpoint.errors import HardpointError
from hardpoint_cpu.native.library import ENDED, availability
from hardpoint_engine import PoolingParams, SamplingParams
from hardpoint_engine.scheduling.results import NoNumbersError
from native_models import FAMILIES, PROMPTS, engine, program_threads, tokens

available = availability()
pytestmark = pytest.mark.skipif(not available.levels, reason=available.reason)

THREADS = min(2, len(os.sched_getaffinity(0)))
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def first_scores(results) -> list[dict[int, float]]:
    return [
        {token: entry.logprob for token, entry in each.outputs[0].logprobs[0].items()}
        for each in results
    ]


def distance(ours, theirs) -> float:
    return max(
        abs(mine[token] - other[token])
        for mine, other in zip(ours, theirs, strict=True)
        for token in mine.keys() & other.keys()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_scores_are_those_of_torch(checkpoint, family):
    folder = checkpoint(family)
    with engine(folder, "off") as llm:
        expected = llm.generate(PROMPTS, SCORED)
    with engine(folder, "on") as llm:
        found = llm.generate(PROMPTS, SCORED)
        assert (
            tokens(llm.generate(PROMPTS, GREEDY))
            == tokens(llm.generate(PROMPTS[::-1], GREEDY))[::-1]
        )
    assert tokens(found) == tokens(expected)
    assert distance(first_scores(found), first_scores(expected)) < 2e-4


def whole(results) -> list[tuple[list[int], str]]:
    return [(list(each.outputs[0].token_ids), str(each.outputs[0].logprobs)) for each in results]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_a_family_do_not_depend_on_how_the_work_is_cut_up(checkpoint, family, dtype):
    folder = checkpoint(family, getattr(torch, dtype))
    with engine(folder, "on", dtype=dtype, enable_prefix_caching=False) as llm:
        alone = [whole(llm.generate([prompt], SCORED))[0] for prompt in PROMPTS]
        assert whole(llm.generate(PROMPTS[::-1] * 2, SCORED)) == alone[::-1] * 2
    for size in (1, 7, 64):
        chunks = {"prefill_chunk_size": size, "max_num_batched_tokens": max(size, 8)}
        with engine(folder, "on", dtype=dtype, max_num_seqs=8, **chunks) as llm:
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, size
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, size  # the cache is warm


@pytest.mark.parametrize("level", available.levels)
def test_numbers_do_not_depend_on_how_the_work_is_cut_up(checkpoint, level):
    folder = checkpoint("heads")
    with engine(folder, "on", level, enable_prefix_caching=False) as llm:
        alone = [whole(llm.generate([prompt], SCORED))[0] for prompt in PROMPTS]
        assert whole(llm.generate(PROMPTS * 3, SCORED)) == alone * 3
    for keys in (
        {"prefill_chunk_size": 7, "max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_kv_blocks": 36, "enable_prefix_caching": False},  # fewer than all need: preempted
        {"block_size": 1},
    ):
        with engine(folder, "on", level, **keys) as llm:
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, keys
            assert whole(llm.generate(PROMPTS, SCORED)) == alone, keys  # the cache is warm


def test_bfloat16_weights_are_computed_in_float32(checkpoint):
    """Torch rounds after each operation; the program only what it keeps in a narrow cache."""
    folder = checkpoint("llama", torch.bfloat16)

    def scores(native, **keys):
        with engine(folder, native, **keys) as llm:
            return first_scores(llm.generate(PROMPTS, SCORED))

    exact, ours = scores("off"), scores("on", dtype="bfloat16")
    assert distance(ours, exact) < 0.1
    assert distance(ours, exact) < distance(scores("off", dtype="bfloat16"), exact)


def test_steps_that_want_more_run_through_torch_and_the_log_says_so_once(checkpoint, caplog):
    folder = checkpoint("llama")
    asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    with engine(folder, "off") as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
        vectors = [each.embedding for each in llm.embed(PROMPTS, PoolingParams())]
    with caplog.at_level(logging.INFO), engine(folder, "on") as llm:
        for _ in range(2):
            results = llm.generate(PROMPTS, asked)
            assert tokens(results) == [each[:4] for each in expected]
        assert all(result.prompt_logprobs for result in results)
        for mine, torchs in zip(llm.embed(PROMPTS, PoolingParams()), vectors, strict=True):
            assert mine.embedding == pytest.approx(torchs, abs=1e-5)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    said = [each.message for each in caplog.records if "through torch" in each.message]
    assert len([each for each in said if "scores of prompts" in each]) == 1
    assert len([each for each in said if "vectors" in each]) == 1


def test_a_hook_on_a_module_is_not_passed_over(checkpoint, caplog):
    def silence(worker):
        mlp = worker.model_runner.get_model().layers[1].mlp
        worker.handle = mlp.register_forward_hook(lambda module, given, out: out * 0)

    with engine(checkpoint("llama"), "off") as llm:
        whole = tokens(llm.generate(PROMPTS, GREEDY))
        llm.reset_prefix_cache()
        llm.collective_rpc(silence)
        silenced = tokens(llm.generate(PROMPTS, GREEDY))
    assert silenced != whole
    with caplog.at_level(logging.INFO), engine(checkpoint("llama"), "on") as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == whole
        llm.reset_prefix_cache()
        llm.collective_rpc(silence)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == silenced
        llm.collective_rpc(lambda worker: worker.handle.remove())
        llm.reset_prefix_cache()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == whole
    assert "a module of the model has a hook" in caplog.text


def test_changed_and_exchanged_weights_are_used(checkpoint):
    def change(worker):
        worker.model_runner.get_model().layers[0].mlp.down.weight.mul_(-1)

    def exchange(worker):
        down = worker.model_runner.get_model().layers[0].mlp.down
        down.weight = torch.nn.Parameter(down.weight.clone() * 2, requires_grad=False)

    found = {}
    for native in ("off", "on"):
        with engine(checkpoint("llama"), native, enable_prefix_caching=False) as llm:
            found[native] = []
            for do in (lambda worker: None, change, exchange):
                llm.collective_rpc(do)
                found[native].append(tokens(llm.generate(PROMPTS, GREEDY)))
    assert found["on"] == found["off"]
    assert found["on"][0] != found["on"][1] != found["on"][2]


def spoil(model):
    model.model.embed_tokens.weight[50] = torch.nan


def test_a_number_that_is_none_fails_its_request_alone(checkpoint):
    folder = checkpoint("heads", change=spoil)
    good = [[3, 4, 5], [6, 7]]
    with engine(folder, "off") as llm:
        expected = tokens(llm.generate(good, GREEDY))
    for params in (GREEDY, SCORED):
        with engine(folder, "on") as llm:
            with pytest.raises(NoNumbersError, match=r"no numbers for request 1 .97 are NaN"):
                llm.generate([good[0], [4, 50, 5], good[1]], params)
            assert tokens(llm.generate(good, GREEDY)) == expected


def team_threads() -> int:
    found = 0
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += (path / "comm").read_text() == "hardpoint-team\n"
    return found


def wait_for_team(count: int) -> None:
    """A thread gives itself its name, when it first runs."""
    deadline = time.monotonic() + 60
    while team_threads() != count:
        assert time.monotonic() < deadline, (team_threads(), count)
        time.sleep(0.01)


def test_two_engines_live_side_by_side_and_leave_no_thread(checkpoint):
    folder = checkpoint("llama")
    with engine(folder, "off") as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY))
    found = {}

    def ask(name, llm):
        found[name] = [tokens(llm.generate(PROMPTS, GREEDY)) for _ in range(3)]

    with engine(folder, "on", threads=THREADS) as first:
        assert program_threads(first) == THREADS
        wait_for_team(THREADS - 1)
        with engine(folder, "on", threads=THREADS) as second:
            wait_for_team(2 * (THREADS - 1))
            asking = [
                threading.Thread(target=ask, args=each)
                for each in (("first", first), ("second", second))
            ]
            for each in asking:
                each.start()
            for each in asking:
                each.join(60)
        assert team_threads() == THREADS - 1
    assert team_threads() == 0
    assert found == {"first": [expected] * 3, "second": [expected] * 3}


def test_a_model_that_is_not_lowered_runs_through_torch_or_is_refused(checkpoint, caplog, tmp_path):
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.OlmoConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.OlmoForCausalLM(config).save_pretrained(tmp_path)
    words = {f"w{number}": number for number in range(97)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    with caplog.at_level(logging.INFO), engine(tmp_path, "auto") as llm:
        assert program_threads(llm) is None
        llm.generate(PROMPTS[:1], GREEDY)
    said = [each for each in caplog.records if "through torch instead" in each.message]
    (line,) = said
    assert line.levelno == logging.WARNING
    assert "slower: the model is a ForeignModel, which is not lowered yet. A" in line.message
    assert "plugins.cpu.native = 'off' asks for torch" in line.message
    with pytest.raises(HardpointError, match=r"native = 'on'.*ForeignModel"):
        engine(tmp_path, "on").close()


def test_a_long_step_is_ended_between_operations(checkpoint):
    """The driver's wish is asked for before each call, and a call takes as many operations as take
    a moment.
    """

    def hurry(worker):
        runner, asked = worker.model_runner, []
        worker.asked = asked
        program = runner.program
        last = len(program._lowered.ops)
        assert list(program._calls(1)) == [(0, last)]
        program._costs, program._cost = [1e12] * last, 1e12 * last
        assert list(program._calls(1)) == [(place, place + 1) for place in range(last)]
        runner.context = evolve(
            runner.context, cancelled=lambda: bool(asked.append(1)) or len(asked) > 2
        )

    with engine(checkpoint("llama"), "on") as llm:
        llm.collective_rpc(hurry)
        with pytest.raises(HardpointError, match="ended by the driver between operations"):
            llm.generate(PROMPTS[:1], GREEDY)
        assert llm.collective_rpc(lambda worker: len(worker.asked)) == [3]


def test_a_step_is_one_call_up_to_as_many_positions_as_it_says(checkpoint):
    def look(worker):
        program = worker.model_runner.program
        for count in (1, 7):
            most, last = program._at_once(count), len(program._costs)
            assert list(program._calls(count, most)) == [(0, last)]
            assert not program._takes_long(count, most)
            assert len(list(program._calls(count, 2 * most))) > 1
        program._greatest = 1e12
        assert program._at_once(1) == -1

    with engine(checkpoint("llama"), "on") as llm:
        llm.collective_rpc(look)


def test_an_operation_that_takes_long_is_ended_in_the_midst_of_it(checkpoint):
    """The team leaves it between two pieces, and computes the next step whole."""

    def hurry(worker):
        runner, asked = worker.model_runner, []
        program = runner.program
        program._greatest = 1e12
        run, worker.returned = program._library.hp_program_run, []

        def until_ended(*call):
            """Compute again and again, which is one operation that takes long."""
            last = time.monotonic() + 120  # then nobody has ended it
            while (wrong := run(*call)) == 0 and time.monotonic() < last:
                pass
            worker.returned.append(wrong)
            return wrong

        program._library = SimpleNamespace(
            hp_program_run=until_ended, hp_program_choose=program._library.hp_program_choose
        )
        runner.context = evolve(
            runner.context, cancelled=lambda: bool(asked.append(1)) or len(asked) == 2
        )

    with engine(checkpoint("llama"), "on") as llm:
        llm.collective_rpc(hurry)
        with pytest.raises(HardpointError, match="ended by the driver within an operation"):
            llm.generate(PROMPTS[:1], GREEDY)
        assert llm.collective_rpc(lambda worker: worker.returned) == [[ENDED]]
        assert "hardpoint-watch" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("level", available.levels)
def test_a_team_that_was_ended_computes_the_next_step_whole(checkpoint, family, level):
    """With experts, too, whose work depends on what was computed before."""

    def steps(worker):
        program = worker.model_runner.program
        watch = program._watch
        run, returned = program._library.hp_program_run, []

        def after_an_ended_one(*call):
            watch._ended.value = 1
            returned.append(run(*call))
            watch._ended.value = 0
            return run(*call)

        program._library = SimpleNamespace(
            hp_program_run=after_an_ended_one, hp_program_choose=program._library.hp_program_choose
        )
        worker.returned = returned

    with engine(checkpoint(family), "on", level, threads=THREADS) as llm:
        expected = whole(llm.generate(PROMPTS, GREEDY))
        llm.collective_rpc(steps)
        assert whole(llm.generate(PROMPTS, GREEDY)) == expected
        (returned,) = llm.collective_rpc(lambda worker: worker.returned)
        assert returned
        assert set(returned) == {ENDED}
