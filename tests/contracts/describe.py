"""Reads the contracts off the code: name -> one line of text that says all a plugin can rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import hardpoint
from attrs import NOTHING, Attribute, Factory, fields, has
from hardpoint.capabilities import SINCE, Capability

MODULES = (
    "hardpoint.hookspecs", "hardpoint.records", "hardpoint.capabilities", "hardpoint.platform",
    "hardpoint.executor", "hardpoint.worker_calls", "hardpoint.worker", "hardpoint.model_runner",
    "hardpoint.logits_processor", "hardpoint.messages", "hardpoint.kv_cache",
    "hardpoint.sampling_params", "hardpoint.pooling_params", "hardpoint.adapters",
    "hardpoint.sleep", "hardpoint.deprecated", "hardpoint.draws", "hardpoint.logprob_rows",
    "hardpoint.errors", "hardpoint.config.schema", "hardpoint.checkpoints.description",
    "hardpoint.checkpoints.weight_source",
)  # fmt: skip
"""What carries the number ``hardpoint.API``: all public names that these modules define."""
CLASSES = ("hardpoint.registry:Registry", "hardpoint.rpc.host:WorkerHost",
           "hardpoint.rpc.calls:Call")  # fmt: skip
"""And what an executor's author is handed, of modules that are core's own otherwise."""
METHODS = ("hardpoint.rpc.calls:CallTable.begin", "hardpoint.rpc.calls:CallTable.deliver")
"""Of which a class has more that is core's own."""

Lines = dict[str, str]


def described() -> Lines:
    """Return the contracts as the code has them now."""
    lines: Lines = {}
    for name in MODULES:
        lines |= _module(importlib.import_module(name))
    for reference in CLASSES:
        name, _, kind = reference.partition(":")
        lines |= class_lines(f"{name}.{kind}", getattr(importlib.import_module(name), kind))
    for reference in METHODS:
        name, _, path = reference.partition(":")
        kind, _, method = path.partition(".")
        function = getattr(getattr(importlib.import_module(name), kind), method)
        lines[f"{name}.{path}"] = f"method {signature(function)}"
    return dict(sorted(lines.items()))


def number() -> str:
    """Return the contract number of the code, as text."""
    return "{}.{}".format(*hardpoint.API)


def _module(module: ModuleType) -> Lines:
    tree = ast.parse(inspect.getsource(module))
    lines: Lines = {f"{module.__name__}.{name}": "value" for name in _assigned(tree.body)}
    for name, value in vars(module).items():
        path = f"{module.__name__}.{name}"
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            lines |= class_lines(path, value)
        elif inspect.isfunction(value):
            kind = "hook" if hasattr(value, "hardpoint_spec") else "function"
            first = getattr(value, "hardpoint_spec", {}).get("firstresult")
            lines[path] = f"{kind} {signature(value)}" + (", the first answer" if first else "")
    return lines


def class_lines(path: str, kind: type) -> Lines:
    """Return the lines of a class: its fields or constructor, methods, attributes."""
    if issubclass(kind, Enum):
        return {path: "enumeration"} | {
            f"{path}.{member.name}": f"member {member.value!r}{_since(member)}" for member in kind
        }
    lines = {path: f"{'record' if has(kind) else 'class'} of {_bases(kind)}"}
    if has(kind):
        lines |= {
            f"{path}.{each.alias or each.name}": f"field {_type(each.type)}{_default(each)}"
            for each in fields(kind) if each.init and not each.name.startswith("_")
        }  # fmt: skip
    elif "__init__" in vars(kind):
        lines[f"{path}()"] = f"constructor {signature(vars(kind)['__init__'])}"
        lines |= {f"{path}.{name}": "attribute of an instance" for name in _set_by(kind)}
    return lines | dict(_members(path, kind, taken={line.rpartition(".")[2] for line in lines}))


def _members(path: str, kind: type, taken: set[str]) -> Iterator[tuple[str, str]]:
    for name, value in vars(kind).items():
        if name.startswith("_") or name in taken:
            continue
        abstract = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
        if isinstance(value, property):
            yield f"{path}.{name}", f"{abstract}property{_returns(value.fget)}"
        elif isinstance(value, classmethod | staticmethod):
            word = "class method" if isinstance(value, classmethod) else "static method"
            yield f"{path}.{name}", f"{abstract}{word} {signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{path}.{name}", f"{abstract}method {signature(value)}"
    for name, hint in vars(kind).get("__annotations__", {}).items():
        if not name.startswith("_") and name not in taken and not has(kind):
            default = vars(kind).get(name, NOTHING)
            shown = "" if default is NOTHING else f" = {_shown(default)}"
            yield f"{path}.{name}", f"attribute {_type(hint)}{shown}"


def _set_by(kind: type) -> Iterator[str]:
    """Give the public names that the constructor of a class sets on the object."""
    source = textwrap.dedent(inspect.getsource(vars(kind)["__init__"]))
    return _assigned(ast.walk(ast.parse(source)), "self.")


def _assigned(nodes: Iterable[ast.AST], before: str = "") -> Iterator[str]:
    """Give the public names that statements assign to, of what is written ``before`` them."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    text = ast.unparse(each)
                    name = text.removeprefix(before)
                    if text.startswith(before) and name.isidentifier() and name[0] != "_":
                        yield name


def signature(function: Any) -> str:
    """Return the arguments as text, without self and cls; what may be left out says so by ``=``."""
    parts, starred = [], False
    for name, each in inspect.signature(function).parameters.items():
        if name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        starred = starred or each.kind is each.VAR_POSITIONAL
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        hint = "" if each.annotation is each.empty else f": {_type(each.annotation)}"
        default = "" if each.default is each.empty else f" = {_shown(each.default)}"
        parts.append(f"{star}{name}{hint}{default}")
    return f"({', '.join(parts)}){_returns(function)}"


def _returns(function: Any) -> str:
    told = inspect.signature(function).return_annotation
    return "" if told is inspect.Signature.empty else f" -> {_type(told)}"


def _type(hint: Any) -> str:
    return hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))


def _default(attribute: Attribute[Any]) -> str:
    if attribute.default is NOTHING:
        return ""
    if "help" in attribute.metadata:
        return " = ..."  # of a configuration key nothing is promised but that it has a default
    if isinstance(attribute.default, Factory):  # type: ignore[arg-type]
        return f" = {attribute.default.factory.__name__}()"
    return f" = {_shown(attribute.default)}"


def _shown(value: Any) -> str:
    named = inspect.isfunction(value) or inspect.isclass(value)
    return value.__qualname__ if named else str(value) if isinstance(value, Enum) else repr(value)


def _since(member: Enum) -> str:
    return ", since {}.{}".format(*SINCE[member]) if isinstance(member, Capability) else ""


def _bases(kind: type) -> str:
    return ", ".join(base.__name__ for base in kind.__bases__)
