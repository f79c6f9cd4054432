"""What a change of the contracts does to plugins that were built for them: it breaks, or it adds.

The rules are those of ``docs/versions.md``. A line of text stands for a name (see describe.py).
"""

from __future__ import annotations

from attrs import field, frozen
from describe import Lines

IMPLEMENTED = (
    "hardpoint.platform.Platform", "hardpoint.worker.Worker",
    "hardpoint.model_runner.ModelRunner", "hardpoint.logits_processor.LogitsProcessor",
    "hardpoint_runtime.device.DeviceOps", "hardpoint_runtime.device.TorchDeviceOps",
    "hardpoint_runtime.worker.TorchWorker", "hardpoint_runtime.model_runner.TorchModelRunner",
    "hardpoint_runtime.quantization.Quantization", "hardpoint_runtime.quantization.PackedForm",
    "hardpoint_engine.AdmissionPolicy", "hardpoint_conformance.Probe",
    "hardpoint_conformance.Oracle",
)  # fmt: skip
"""Classes whose methods plugins override and core calls: an argument more would reach methods that
do not take it.
"""


@frozen(kw_only=True)
class Comparison:
    """``breaks``: sentences, one for each way in which a plugin would break. ``added``: what may
    be there in addition, as it is now.
    """

    breaks: list[str] = field(factory=list)
    added: Lines = field(factory=dict)


def compared(before: Lines, now: Lines, number: str) -> Comparison:
    """Compare the contracts as they were frozen under ``number`` with what they are now."""
    result = Comparison()
    for name, line in before.items():
        if name not in now:
            result.breaks.append(f"{name} is gone; it was: {line}")
        elif now[name] != line:
            if _only_adds(name, line, now[name]):
                result.added[name] = now[name]
            else:
                result.breaks.append(f"{name} was: {line}\n{' ' * len(name)} is now: {now[name]}")
    for name in now.keys() - before.keys():
        complaint = _against(name, now[name], before, number)
        if complaint:
            result.breaks.append(f"{name} is new ({now[name]}): {complaint}")
        else:
            result.added[name] = now[name]
    result.breaks.sort()
    return result


def _against(name: str, line: str, before: Lines, number: str) -> str | None:
    """Return why something new breaks plugins, or None."""
    built = name.removesuffix("()")
    if name != built and built in before and any(" = " not in each for each in _named(line)):
        return "who builds it, or derives from it, calls it without; give each argument a default"
    owner = name.rpartition(".")[0]
    if owner in before and line.startswith("abstract"):
        return "who derives from the class has none; give it a default"
    if owner in before and line.startswith("field") and " = " not in line:
        return "who builds the record does not name it; give it a default"
    _, _, since = line.partition(", since ")
    if since and tuple(map(int, since.split("."))) <= tuple(map(int, number.split("."))):
        return f"plugins of {number} do not declare it; give it a higher number in SINCE"
    return None


def _only_adds(name: str, line: str, now: str) -> bool:
    """Whether a changed line of a callable only has more arguments, which may be left out."""
    old_kind, old_arguments, old_rest = _parts(line)
    kind, arguments, rest = _parts(now)
    implemented = line.startswith("abstract") or name.rpartition(".")[0] in IMPLEMENTED
    if implemented or (old_kind, old_rest) != (kind, rest) or old_arguments is None:
        return False
    old, new = (_places(each or []) for each in (old_arguments, arguments))
    more = [*new[0][len(old[0]) :], *(each for each in new[1] if each not in old[1])]
    kept = new[0][: len(old[0])] == old[0] and all(each in new[1] for each in old[1])
    return kept and (kind == "hook" or all(" = " in each for each in more))


def _named(line: str) -> list[str]:
    """Return the arguments of a callable's line but ``*`` and those that gather the rest."""
    return [each for each in _parts(line)[1] or () if not each.startswith("*")]


def _parts(line: str) -> tuple[str, list[str] | None, str]:
    """Return what a line says before, in and after its parentheses."""
    kind, opened, rest = line.partition(" (")
    if not opened or kind.startswith(("field", "attribute", "member")):
        return line, None, ""
    arguments, depth, part = [], 0, ""
    for place, char in enumerate(rest):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return kind, [each for each in [*arguments, part.strip()] if each], rest[place + 1 :]
        if char == "," and depth == 0:
            arguments.append(part.strip())
            part = ""
        else:
            part += char
    raise ValueError(f"unbalanced: {line}")


def _places(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part arguments at ``*``: those by place, those by keyword."""
    at = arguments.index("*") if "*" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]
