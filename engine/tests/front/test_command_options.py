"""Every key and every parameter has a flag of its own name; texts become values or are refused."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from attrs import fields
from click.testing import CliRunner
from hardpoint.cli_options import configuration_options, given_flags
from hardpoint.config.keys import KEYS
from hardpoint.config.loading import load_config
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.sampling_params import SamplingParams
from hardpoint_engine.cli.command_options import (
    SAMPLING_HELP,
    sampling_of,
    sampling_options,
)

NO_FLAGS = {
    "seed",  # a configuration key
    "detokenize",  # an answer is text
    "logprob_token_ids",  # these need tables, or have no place in what is printed
    "logit_bias",
    "bad_word_ids",  # what `bad_words` becomes
    "structured_outputs",  # --json-schema, --regex, --choice
    "extra_args",
}


def options_of(*arguments: str) -> dict:
    """What the command gets for a command line."""
    found = {}

    @click.command()
    @sampling_options
    @configuration_options
    def command(**options) -> None:
        found.update(options)

    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found


def sampling(*arguments: str, seeded: bool = False) -> SamplingParams:
    return sampling_of(options_of(*arguments), seeded=seeded)


def test_every_sampling_parameter_is_a_flag_or_left_out_on_purpose():
    names = {attribute.name for attribute in fields(SamplingParams)}
    assert set(SAMPLING_HELP) == names - NO_FLAGS


def test_every_key_is_a_flag_that_loads():
    values = {int: "3", float: "0.5", str: "some", tuple: "a,b"} | {
        "graph_sizes": "4,2",  # a list of numbers
    }
    for key in KEYS:
        if key.flag is None:
            continue
        value = key.choices[0] if key.choices else values.get(key.path) or values.get(key.type)
        given = [] if key.type is bool else [value]
        options = options_of(key.flag, *given)
        flags = given_flags(options)
        assert list(flags) == [key.path]
        config = load_config(flags=flags, environ={})
        origin = config.origins[key.path]
        assert origin in (f"flag {key.flag}", f"default (auto by flag {key.flag})")


def test_nothing_given_sets_nothing():
    assert given_flags(options_of()) == {}


def test_flags_become_parameters():
    found = sampling(
        "--temperature", "0.5", "--top-k", "-1", "--max-tokens", "7", "--stop", "a,b",
        "--stop", "c", "--stop-token-ids", "1,2", "--stop-token-ids", "3", "--ignore-eos",
        "--logprobs", "2",
    )  # fmt: skip
    assert found == SamplingParams(
        temperature=0.5, top_k=-1, max_tokens=7, stop=("a,b", "c"), stop_token_ids=(1, 2, 3),
        ignore_eos=True, logprobs=2,
    )  # fmt: skip


def test_a_person_gets_the_best_answer_unless_a_flag_asks_for_a_draw():
    assert sampling().temperature == 0
    assert sampling().max_tokens == 512
    assert sampling("--min-tokens", "600").max_tokens == 600
    for flag, value in (("--top-p", "0.9"), ("--top-k", "5"), ("--min-p", "0.1"), ("--n", "2")):
        assert sampling(flag, value).temperature == 1
    assert sampling(seeded=True).temperature == 1
    assert sampling("--top-p", "0.9", "--temperature", "0").temperature == 0


def test_forms_of_answers_have_flags(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    found = [
        sampling(*arguments).structured_outputs
        for arguments in (
            ("--json-schema", str(schema)),
            ("--regex", "a+"),
            ("--choice", "yes, sir", "--choice", "no"),
            (),
        )
    ]
    assert found == [
        {"json": '{"type": "object"}'}, {"regex": "a+"}, {"choice": ("yes, sir", "no")}, None,
    ]  # fmt: skip
    for wrong, words in (
        (("--json-schema", str(tmp_path / "none")), "none: it cannot be read: .*No such file"),
        (("--regex", "a", "--choice", "b"), "must name exactly one"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            sampling(*wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "warm"], "temperature must be a number, not 'warm'"),
        (["--temperature", "2.5"], r"temperature must be a number in \[0, 2\], not 2.5"),
        (["--temperature", "nan"], "temperature must be a number in"),
        (["--max-tokens", "1.5"], "max_tokens must be a whole number, not '1.5'"),
        (["--max-tokens", "0"], "max_tokens must be a whole number of at least 1"),
        (["--stop-token-ids", "1,x"], "stop_token_ids must be whole numbers, not 'x'"),
        (["--n", "2", "--temperature", "0"], "n must be 1 when temperature is 0"),
    ],
)
def test_wrong_parameters_are_named(arguments, words):
    with pytest.raises(InvalidRequestError, match=words):
        sampling(*arguments)


def test_wrong_keys_are_named_with_their_flag():
    with pytest.raises(ConfigError, match=r"dtype = 'float8' \(flag --dtype\)"):
        load_config(flags=given_flags(options_of("--dtype", "float8")), environ={})


def test_help_loads_no_engine():
    script = (
        "import sys\n"
        "from hardpoint_engine.cli.commands import generate\n"
        "from click.testing import CliRunner\n"
        "assert '--max-num-seqs' in CliRunner().invoke(generate, ['--help']).output\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'cattrs', 'rich', 'cloudpickle'}\n"
        "ours = {'hardpoint_engine.llm', 'hardpoint_engine.build', 'hardpoint.registry'}\n"
        "print(sorted((heavy | ours) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
