"""The flags of ``hardpoint generate`` for sampling parameters, each by its own name. Those of the
configuration are in :mod:`hardpoint.cli_options`. Light: a command's help must not load the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from attrs import Attribute, fields
from hardpoint.errors import InvalidRequestError
from hardpoint.sampling_params import SamplingParams

SAMPLING_HELP: Mapping[str, str] = {
    "temperature": "0 takes the best token; higher is more varied",
    "top_p": "draw from the best tokens that together have this probability",
    "top_k": "draw from this many best tokens; 0: all",
    "min_p": "drop tokens below this share of the best one's probability",
    "presence_penalty": "subtracted from tokens that were generated before",
    "frequency_penalty": "subtracted for each time a token was generated before",
    "repetition_penalty": "divides the odds of tokens of prompt and answer",
    "max_tokens": "length of an answer in tokens",
    "min_tokens": "no end before so many tokens",
    "stop": "text that ends the answer; may be given again",
    "stop_token_ids": "token ids that end the answer: 1,2,...",
    "ignore_eos": "go on after the model's own end token",
    "include_stop": "leave what ended the answer in its text",
    "skip_special_tokens": "leave special tokens out of the text",
    "n": "answers for each prompt",
    "logprobs": "compute so many log-probabilities for each token",
    "prompt_logprobs": "compute so many for each token of the prompt",
    "bad_words": "text that may not be generated; may be given again",
    "allowed_token_ids": "the only token ids that may be generated: 1,2,...",
}
"""The parameters that are flags. ``seed`` is a configuration key of that name."""

FORMS: Mapping[str, tuple[str, str]] = {
    "json_schema": ("FILE", "answer in JSON that is valid under the schema in this file"),
    "regex": ("TEXT", "answer what this regular expression matches as a whole"),
    "choice": ("TEXT", "answer one of these texts; give it several times"),
}
"""The flags for ``structured_outputs``, which is a table: what they take, and their help."""

DRAWING = ("top_p", "top_k", "min_p", "n")
"""Flags that only mean something when tokens are drawn."""
DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 512}
"""Where a person at a terminal wants something else than SamplingParams gives by itself."""


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``command`` with a flag for every sampling parameter in ``SAMPLING_HELP``, and with
    ``FORMS``.
    """
    for name, (metavar, about) in reversed(list(FORMS.items())):
        flag = "--" + name.replace("_", "-")
        option = click.option(flag, name, metavar=metavar, help=about, multiple=name == "choice")
        command = option(command)
    by_name = {attribute.name: attribute for attribute in fields(SamplingParams)}
    for name in reversed(list(SAMPLING_HELP)):
        command = _sampling_option(by_name[name])(command)
    return command


def _sampling_option(attribute: Attribute[Any]) -> Callable[..., Any]:
    flag = "--" + attribute.name.replace("_", "-")
    own = DEFAULTS.get(attribute.name, attribute.default)
    number = isinstance(own, int | float) and not isinstance(own, bool)
    shown = f" [default: {own:g}]" if number else ""
    if attribute.name == "temperature":
        shown = (
            f" [default: 0, or 1 with --seed or a flag that asks for a draw ({_drawing_flags()})]"
        )
    about = SAMPLING_HELP[attribute.name] + shown
    kind = str(attribute.type)
    if kind == "bool":
        return click.option(f"{flag}/--no-{flag[2:]}", attribute.name, default=None, help=about)
    metavar = {"f": "X", "i": "N"}.get(kind[0], "IDS" if "int" in kind else "TEXT")
    several = kind.startswith("tuple")
    return click.option(flag, attribute.name, multiple=several, metavar=metavar, help=about)


def _drawing_flags() -> str:
    return ", ".join("--" + name.replace("_", "-") for name in DRAWING)


def sampling_of(options: Mapping[str, Any], *, seeded: bool) -> SamplingParams:
    """Return the parameters that the flags ask for. Raises InvalidRequestError.

    A flag that shapes a draw (``seeded``: the key ``seed`` is set) would be without effect at
    temperature 0; the default is 1 then.
    """
    types = {attribute.name: str(attribute.type) for attribute in fields(SamplingParams)}
    given = {
        name: _read(name, types[name], options[name])
        for name in SAMPLING_HELP
        if options.get(name) not in (None, ())
    }
    defaults = dict(DEFAULTS)
    if seeded or any(name in given for name in DRAWING):
        del defaults["temperature"]
    if (wishes := _forms(options)) is not None:
        given["structured_outputs"] = wishes
    if "min_tokens" in given:
        defaults["max_tokens"] = max(defaults["max_tokens"], given["min_tokens"])
    return SamplingParams.from_mapping({**defaults, **given})


def _forms(options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the form that the flags name, None for none. Raises InvalidRequestError for what is
    none at sight.
    """
    given = {name: options[name] for name in FORMS if options.get(name) not in (None, ())}
    if not given:
        return None
    from hardpoint_engine.structured.specification import read_specification

    if "json_schema" in given:
        path = given.pop("json_schema")
        try:
            given = {"json": Path(path).read_text(), **given}
        except (OSError, UnicodeError) as error:
            raise InvalidRequestError(
                f"--json-schema {path}: it cannot be read: {error}",
                field="structured_outputs",
                value=path,
            ) from None
    read_specification(given)
    return given


def _read(name: str, kind: str, value: Any) -> Any:
    """Return a flag's text as the parameter's type."""
    if kind.startswith("tuple[int"):
        parts = [part for text in value for part in text.split(",") if part.strip()]
        return tuple(_number(name, int, part, "whole numbers") for part in parts)
    if kind.startswith("int"):
        return _number(name, int, value, "a whole number")
    if kind.startswith("float"):
        return _number(name, float, value, "a number")
    return value


def _number(name: str, kind: type, text: str, what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InvalidRequestError(
            f"{name} must be {what}, not {text!r}", field=name, value=text
        ) from None
