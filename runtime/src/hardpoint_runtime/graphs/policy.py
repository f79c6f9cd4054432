"""What a plugin may decide about graphs: sizes, padding, and which modes are preferred."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.sizes import CaptureSizes

PREFERENCE = (GraphMode.FULL, GraphMode.PIECEWISE)
"""The order in which modes are tried: the more is replayed, the better."""


class DispatchPolicy:
    """The built-in policy, and the base of plugins' (hook ``hardpoint_graph_policies``, chosen by
    the key ``graph_policy``).

    Asked only while the plan is made, in the worker: each answer is checked for every batch that
    can be and kept in the plan, so that a step costs the same whatever the policy. Answers must
    depend on the arguments alone.
    """

    def sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the token counts to make graphs for, given those that would be made. What is more
        than a step may have is left out.
        """
        return sizes

    def pad(self, num_tokens: int, sizes: CaptureSizes) -> int | None:
        """Return the size to which a batch is padded, None to run it eagerly.

        It must be one of ``sizes`` and hold the tokens.
        """
        return sizes.pad(num_tokens)

    def modes(self, num_tokens: int, *, uniform: bool) -> Sequence[GraphMode]:
        """Return the modes to try for a batch padded to ``num_tokens``, the preferred first. Modes
        that the engine has no graphs for are passed over; eager comes after the last, or where NONE
        stands.
        """
        return PREFERENCE
