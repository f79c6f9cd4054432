"""From problems to one error: all of them at once, each with its key, value, origin and way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve

from hardpoint.errors import ConfigError
from hardpoint.records import Problem


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """Return the ConfigError that tells all ``problems`` (at least one)."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]), problems=problems)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}", problems=problems)


def with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return ``problem`` with the origin of its value, where it says none itself."""
    return evolve(problem, origin=problem.origin or origins.get(problem.key, ""))


def close(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of ``known`` that ``word`` may have meant, in whichever case; the best
    first.
    """
    from difflib import get_close_matches

    lowered = {each.lower(): each for each in sorted(known)}
    return [lowered[each] for each in get_close_matches(word.lower(), lowered, 3)]


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the sentence with the close matches of ``word``, or ``otherwise``."""
    near = close(word, known)
    return f"Did you mean {' or '.join(near)}?" if near else otherwise
