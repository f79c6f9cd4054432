"""Graph modes: what of a step is replayed instead of launched operation by operation.

A step runs in one of three ways: NONE (eager), PIECEWISE (segments between attention layers are
replayed, attention is eager) or FULL (the whole forward is replayed). An engine is set to a mode
that names one for its uniform decode batches and one for all others.
"""

from __future__ import annotations

import enum

from hardpoint.errors import ConfigError


class GraphMode(enum.Enum):
    """NONE, PIECEWISE and FULL are also what a single step runs in; the others are pairs.

    ==================  =========  =========
    mode                decode     mixed
    ==================  =========  =========
    NONE                NONE       NONE
    PIECEWISE           PIECEWISE  PIECEWISE
    FULL                FULL       FULL
    FULL_DECODE_ONLY    FULL       NONE
    FULL_AND_PIECEWISE  FULL       PIECEWISE
    ==================  =========  =========
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @classmethod
    def named(cls, name: str) -> GraphMode:
        """Return the mode that the configuration key ``graph_mode`` names, in any case of letters.

        Raises ConfigError listing those there are.
        """
        try:
            return cls(name.lower())
        except ValueError:
            known = ", ".join(mode.value for mode in cls)
            raise ConfigError(
                f"graph_mode = {name!r}: there is no such mode. Modes: {known}"
            ) from None

    @property
    def decode(self) -> GraphMode:
        """What a uniform batch runs in: every request has 1 + number of drafts tokens."""
        return _PAIRS.get(self, (self, self))[0]

    @property
    def mixed(self) -> GraphMode:
        """What any other batch runs in."""
        return _PAIRS.get(self, (self, self))[1]

    @property
    def parts(self) -> frozenset[GraphMode]:
        """The modes other than NONE that steps may run in."""
        return frozenset({self.decode, self.mixed} - {GraphMode.NONE})

    @property
    def is_single(self) -> bool:
        """Whether one step can run in this mode: it is no pair."""
        return self not in _PAIRS

    @property
    def separate_decode(self) -> bool:
        """Whether uniform batches have graphs of their own."""
        return self.decode is not self.mixed

    @property
    def needs_splitting(self) -> bool:
        """Whether the model must be split at its attention layers."""
        return GraphMode.PIECEWISE in self.parts

    def contains(self, part: GraphMode) -> bool:
        """Whether steps may run in ``part``; every mode contains NONE."""
        return part is GraphMode.NONE or part in self.parts

    @staticmethod
    def pair(decode: GraphMode, mixed: GraphMode) -> GraphMode:
        """Return the mode with these parts; raises ValueError if there is none."""
        for mode in GraphMode:
            if (mode.decode, mode.mixed) == (decode, mixed):
                return mode
        raise ValueError(f"no graph mode runs decode in {decode.name} and the rest in {mixed.name}")


_PAIRS = {
    GraphMode.FULL_DECODE_ONLY: (GraphMode.FULL, GraphMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (GraphMode.FULL, GraphMode.PIECEWISE),
}
