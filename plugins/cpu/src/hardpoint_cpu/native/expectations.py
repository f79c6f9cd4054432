"""Whether a model will run as a native program, as far as the driver can tell: without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES

if TYPE_CHECKING:
    from hardpoint.config import Config
    from hardpoint.config.schema import GraphConfig


def why_no_program(config: Config) -> str | None:
    """Return why the configured model is not lowered, None if that cannot be told before loading:
    :func:`hardpoint_cpu.native.refusals.refusal` has the last word.
    """
    described = config.description
    if described is not None and described.architecture not in ARCHITECTURES:
        return f"{described.architecture} is an architecture that is not lowered yet"
    return next(other_graphs(config.graph), None)


def other_graphs(wanted: GraphConfig) -> Iterator[str]:
    """Yield what of the configured graphs a program is not."""
    mode = wanted.graph_mode
    if mode == "none":
        yield "graph_mode = 'none', so that no step replays anything"
    elif mode not in (None, "full"):
        yield f"graph_mode = {mode!r}, and a program is a full graph"
    if wanted.graph_sizes is not None:
        yield "graph_sizes is set, and a program is for steps of any size"
    if wanted.graph_policy is not None:
        yield f"graph_policy = {wanted.graph_policy!r} chooses among recorded graphs"


def slow_way(reason: str) -> str:
    """Return how the user is told that steps run through torch, and what can be done."""
    if "graph_" in reason:
        way_out = "Leave that key out"
    elif "native library" in reason:
        way_out = "Install hardpoint-cpu again where there is a C++ compiler"
    else:
        way_out = "A model of a built-in architecture is faster"
    return (
        f"steps run through torch instead of a native program, and slower: {reason}. {way_out}; "
        "plugins.cpu.native = 'off' asks for torch and ends this message, 'on' makes it an error."
    )
