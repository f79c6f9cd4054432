"""Who holds what: consecutive, as equal as can be, the first ranks one more. Pure arithmetic."""

from __future__ import annotations

from attrs import frozen
from hardpoint.errors import ConfigError


@frozen
class Span:
    """``start`` up to ``stop`` of ``total`` things in a row."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether they are all there are."""
        return self.size == self.total

    @property
    def range(self) -> range:
        """Their indices."""
        return range(self.start, self.stop)

    @property
    def slice(self) -> slice:
        """Their place in a dimension that has all."""
        return slice(self.start, self.stop)

    def times(self, factor: int) -> Span:
        """Return the span of their elements if each thing has ``factor``."""
        return Span(self.start * factor, self.stop * factor, self.total * factor)


def whole(total: int) -> Span:
    """Return the span of all."""
    return Span(0, total, total)


def share(total: int, index: int, size: int) -> Span:
    """Return the share of member ``index`` of ``size``; the first ``total % size`` get one more."""
    least, more = divmod(total, size)
    start = index * least + min(index, more)
    return Span(start, start + least + (index < more), total)


def shares(total: int, size: int) -> tuple[Span, ...]:
    """Return everybody's share."""
    return tuple(share(total, index, size) for index in range(size))


@frozen(kw_only=True)
class Heads:
    """The attention heads of one tensor shard: its query heads, and the key-value heads that they
    attend to.
    """

    query: Span
    kv: Span


def heads(num_heads: int, num_kv_heads: int, index: int, size: int) -> Heads:
    """Return the heads of tensor shard ``index`` of ``size``.

    Key-value heads are shared out, the first ranks one more, and each takes its query heads along.
    Where there are more ranks than key-value heads, each head is on ``size / num_kv_heads`` ranks,
    which share its query heads. Raises ConfigError where that is impossible.
    """
    if (reason := why_not(num_heads, num_kv_heads, size)) is not None:
        raise ConfigError(f"tensor_parallel_size = {size}: {reason}")
    each = num_heads // num_kv_heads
    if size <= num_kv_heads:
        kv = share(num_kv_heads, index, size)
        return Heads(query=kv.times(each), kv=kv)
    head, copy = divmod(index, size // num_kv_heads)
    part = share(each, copy, size // num_kv_heads)
    query = Span(head * each + part.start, head * each + part.stop, num_heads)
    return Heads(query=query, kv=Span(head, head + 1, num_kv_heads))


def why_not(num_heads: int, num_kv_heads: int, size: int) -> str | None:
    """Return why the heads cannot be shared by ``size`` ranks, or None."""
    if size <= num_kv_heads:
        return None
    if size % num_kv_heads:
        return (
            f"more ranks than the {num_kv_heads} key-value heads, and no multiple of them, so that "
            "they would be on unequally many ranks"
        )
    if size > num_heads:
        return f"more ranks than the {num_heads} query heads"
    return None
