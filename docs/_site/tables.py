"""Tables that are read off the schema, the enumerations and the classes. Each returns Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version

import hardpoint
import hardpoint_engine
import hardpoint_runtime
from hardpoint.capabilities import SINCE, Capability
from hardpoint.config.keys import KEYS, Key
from hardpoint.rpc.lifecycle import CAPABILITIES, NEEDS, STEPS, Stage


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def keys() -> str:
    """Every configuration key: type, bounds, default, flag, variable, meaning."""
    heads = ("key", "values", "default", "meaning", "flag", "variable")
    rows = [
        (
            f"`{key.path}`", _values(key), _default(key), key.help,
            f"`{key.flag}`" if key.flag else "`--set`", f"`{key.variable}`",
        )
        for key in KEYS
    ]  # fmt: skip
    return table(heads, rows)


def _values(key: Key) -> str:
    if key.choices:
        return ", ".join(f"`{choice}`" for choice in key.choices)
    names = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "`true`, `false`",
        tuple: "list",
        dict: "table",
    }
    bounds = [
        text + f"{key.metadata[name]:g}"
        for name, text in (("low", "at least "), ("above", "more than "), ("high", "at most "))
        if key.metadata.get(name) is not None
    ]
    return ", ".join([names[key.type], *bounds])


def _default(key: Key) -> str:
    if key.default is None or key.default in ((), {}):
        return "unset"
    return f"`{str(key.default).lower()}`"


def numbers() -> str:
    """Return the contract numbers, as they are in this version."""
    rows = [
        ("`hardpoint.API`", hardpoint.API, "hooks, records, messages, the contract classes"),
        ("`hardpoint_runtime.API`", hardpoint_runtime.API, "the torch toolkit"),
        ("`hardpoint_engine.API`", hardpoint_engine.API, "`LLM`, `AdmissionPolicy`"),
    ]
    told = [(name, "{}.{}".format(*number), about) for name, number, about in rows]
    told.append(("`hardpoint-conformance`", version("hardpoint-conformance"), "what is tested"))
    return table(("number", "now", "of"), told)


def capabilities() -> str:
    """Every capability: name, the contract number that brought it, the worker methods behind it."""
    heads = ("capability", "what people read", "since", "worker methods that need it")
    behind: dict[Capability, list[str]] = {}
    for method, capability in CAPABILITIES.items():
        behind.setdefault(capability, []).append(f"`{method}`")
    rows = [
        (
            f"`{each.name}`",
            each.value,
            "{}.{}".format(*SINCE[each]),
            ", ".join(behind.get(each, [])),
        )
        for each in Capability
    ]
    return table(heads, rows)


def stages() -> str:
    """Return the rows of a worker's stages: the method that leads there, what it opens."""
    rows = [
        ("`BUILT`", "construction, which touches no device", "functions sent to it, `shutdown`")
    ]
    for stage, method in STEPS.items():
        opened = [
            f"`{name}`"
            for name, need in NEEDS.items()
            if need is stage and name not in STEPS.values()
        ]
        following = [f"`{STEPS[after]}`" for after in STEPS if after == stage + 1]
        rows.append((f"`{stage.name}`", f"`{method}`", ", ".join([*following, *opened])))
    rows.append((f"`{Stage.CLOSED.name}`", "`shutdown`", "nothing"))
    return "".join(table((), rows).splitlines(keepends=True)[2:])
