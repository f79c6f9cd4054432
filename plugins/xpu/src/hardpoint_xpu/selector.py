"""ONEAPI_DEVICE_SELECTOR: which of the devices that Level Zero shows SYCL takes.

``level_zero:0,1;!level_zero:1`` accepts by terms and then discards by those with an exclamation
mark; discarding alone starts from everything. Grammar: the DPC++ page on environment variables.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from hardpoint_xpu.masks import MaskError

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "offload")
KINDS = ("*", "gpu", "cpu", "fpga")
OURS = ("*", "level_zero")
"""Backends whose devices torch computes on."""


@frozen(kw_only=True)
class Term:
    """One term: whether it discards, its backend, and its devices as they are written."""

    discards: bool
    backend: str
    devices: tuple[str, ...]

    def takes(self, place: int) -> bool:
        """Whether it names the GPU at ``place``. Of a divided device, the whole is meant here."""
        if self.backend not in OURS:
            return False
        return any(
            each in ("*", "gpu") or each.partition(".")[0] in (str(place), "*")
            for each in self.devices
        )


def terms(selector: str) -> tuple[Term, ...]:
    """Return the terms of a selector. Raises MaskError naming the part that is wrong."""
    return tuple(_term(part.strip(), selector) for part in selector.split(";") if part.strip())


def selected(selector: str | None, count: int) -> tuple[int, ...]:
    """Return the places, of ``count`` GPUs, that SYCL takes. Raises MaskError."""
    if selector is None or not selector.strip():
        return tuple(range(count))
    found = terms(selector)
    accepting = [term for term in found if not term.discards]
    discarding = [term for term in found if term.discards]
    return tuple(
        place
        for place in range(count)
        if (not accepting or _any_takes(accepting, place)) and not _any_takes(discarding, place)
    )


def _any_takes(found: Sequence[Term], place: int) -> bool:
    return any(term.takes(place) for term in found)


def _term(text: str, selector: str) -> Term:
    discards = text.startswith("!")
    backend, colon, listed = text.removeprefix("!").lower().partition(":")
    devices = tuple(part.strip() for part in listed.split(","))
    wrong = None
    if not colon:
        wrong = "has no colon: BACKEND:DEVICES"
    elif backend not in BACKENDS:
        wrong = f"names a backend that is none of {', '.join(BACKENDS)}"
    elif bad := [each for each in devices if not _is_device(each)]:
        wrong = f"names the device {bad[0]!r}; numbers, N.M, *, gpu and cpu are understood"
    if wrong:
        raise MaskError(f"{SELECTOR}={selector}: {text!r} {wrong}")
    return Term(discards=discards, backend=backend, devices=devices)


def _is_device(text: str) -> bool:
    parts = text.split(".")
    return text in KINDS or (
        1 <= len(parts) <= 3 and all(part.isdecimal() or part == "*" for part in parts)
    )
