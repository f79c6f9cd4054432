"""What a device's memory is used for: figures at one moment, and the account from which the KV
cache is sized. All in bytes.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class MemorySnapshot:
    """The memory of one device at one moment: ``free`` for anybody, of ``total``; ``reserved`` is
    what torch's allocator of this process has taken, ``allocated`` what its tensors hold of that.
    """

    free: int
    total: int
    reserved: int
    allocated: int

    @property
    def other(self) -> int:
        """What is used and not torch's: runtimes and libraries of this process, and whatever other
        processes hold.
        """
        return max(0, self.total - self.free - self.reserved)


@frozen(kw_only=True)
class MemoryProfile:
    """The account of one rank before its KV cache is there.

    ``budget`` may be held in all. ``weights`` are what loading left, ``peak`` the most that torch's
    allocator held in the largest step, weights included; ``other`` what libraries took beside it
    since the device was taken; ``graphs`` what capturing will take; ``rounding`` what buffers of
    the cache lose to the size of pages.
    """

    budget: int
    weights: int
    peak: int
    other: int = 0
    graphs: int = 0
    rounding: int = 0

    @property
    def available(self) -> int:
        """What is left for the KV cache; negative if the model alone is too large."""
        return self.budget - self.peak - self.other - self.graphs - self.rounding

    def __str__(self) -> str:
        step = self.peak - self.weights
        return (
            f"of a budget of {self.budget} bytes, {self.weights} are weights, {step} the work "
            f"space of the largest step, {self.graphs} graphs, {self.other} libraries' own, "
            f"{self.rounding} lost to rounding; {self.available} are left for the KV cache"
        )
