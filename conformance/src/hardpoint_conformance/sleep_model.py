"""A model of the sleep states, written from the contract's words, for the Worker suite."""

from __future__ import annotations

from attrs import define

TAGS = ("weights", "kv_cache")


@define(eq=False)
class SleepModel:
    """What should be true after each call. ``weights`` and ``kv_cache`` say whether they are in
    memory; ``defined`` whether the weights are what they should be.
    """

    weights: bool = True
    kv_cache: bool = True
    defined: bool = True

    @property
    def sleeping(self) -> frozenset[str]:
        """Tags whose memory is not there."""
        return frozenset(tag for tag in TAGS if not getattr(self, tag))

    @property
    def can_execute(self) -> bool:
        """Executing in any state but awake raises."""
        return self.weights and self.kv_cache and self.defined

    def sleep(self, level: int) -> bool:
        """Level 1 keeps the weights on the host, level 2 drops them; return whether it is allowed:
        of all that is awake, or again as deeply as before.
        """
        if self.sleeping:
            return self.sleeping == frozenset(TAGS) and (level == 1 or not self.defined)
        self.weights = self.kv_cache = False
        self.defined = self.defined and level == 1
        return True

    def wake(self, tags: tuple[str, ...]) -> None:
        """Bring tags back; dropped weights are undefined until they are loaded again."""
        for tag in tags:
            setattr(self, tag, True)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free tags without a backup."""
        for tag in tags:
            setattr(self, tag, False)
        if "weights" in tags:
            self.defined = False

    def reload(self) -> bool:
        """Load the weights again; return whether it is allowed: they must be in memory."""
        if self.weights:
            self.defined = True
        return self.weights
