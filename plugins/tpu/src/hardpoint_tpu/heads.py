"""How a model's heads, and the rows of its other matrices, are spread over n devices. Pure.

Key-value heads go to the devices in order, the first ``kv mod n`` devices get one more; with more
devices than heads, n / kv devices hold the same head and share its query heads. XLA wants equal
shards, so a device with fewer heads holds padding: heads whose weights are all zero, which add
nothing.
"""

from __future__ import annotations

from attrs import frozen
from hardpoint.errors import UnsupportedError

PADDING = -1


@frozen(kw_only=True)
class HeadLayout:
    """``kv[d]`` are the key-value heads of device d, and ``queries[d]`` its query heads, the group
    of each key-value head in turn; PADDING stands for a head of zeros. All devices have as many.
    """

    kv: tuple[tuple[int, ...], ...]
    queries: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> int:
        """How many devices."""
        return len(self.kv)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of one device, padding included."""
        return len(self.kv[0])

    @property
    def query_heads(self) -> int:
        """Query heads of one device, padding included."""
        return len(self.queries[0])

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.query_heads // self.kv_heads


def spread(count: int, devices: int) -> list[list[int]]:
    """Return the indices below ``count`` in order, the first ``count mod devices`` devices with one
    more.
    """
    least, more = divmod(count, devices)
    starts = [device * least + min(device, more) for device in range(devices + 1)]
    return [list(range(starts[d], starts[d + 1])) for d in range(devices)]


def head_layout(heads: int, kv_heads: int, devices: int) -> HeadLayout:
    """Lay ``heads`` query heads over ``kv_heads`` key-value heads out on ``devices``.

    Raises UnsupportedError for more devices than key-value heads that are no multiple of them, or
    than query heads.
    """
    if devices > heads or (devices > kv_heads and devices % kv_heads):
        raise UnsupportedError(
            f"tensor_parallel_size = {devices} with {heads} query and {kv_heads} key-value heads",
            "platform 'tpu'",
            hint=f"Use at most {kv_heads}, or a multiple of it up to {heads}.",
        )
    group = heads // kv_heads
    if devices <= kv_heads:
        kv = spread(kv_heads, devices)
        groups = [[_range(head * group, group) for head in mine] for mine in kv]
    else:
        copies = devices // kv_heads
        kv = [[device // copies] for device in range(devices)]
        shares = spread(group, copies)
        groups = [
            [[device // copies * group + index for index in shares[device % copies]]]
            for device in range(devices)
        ]
    slots = max(len(mine) for mine in kv)
    width = max(len(each) for mine in groups for each in mine)
    return HeadLayout(
        kv=tuple(_filled(mine, slots) for mine in kv),
        queries=tuple(
            tuple(
                head
                for slot in range(slots)
                for head in _filled(mine[slot] if slot < len(mine) else [], width)
            )
            for mine in groups
        ),
    )


def _range(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def _filled(items: list[int], length: int) -> tuple[int, ...]:
    return (*items, *(PADDING,) * (length - len(items)))


def padded_rows(count: int, devices: int) -> list[list[int]]:
    """Return ``count`` rows cut into equal contiguous parts for ``devices``, PADDING at the end."""
    part = -(-count // devices)
    rows = [*range(count), *(PADDING,) * (part * devices - count)]
    return [rows[device * part : (device + 1) * part] for device in range(devices)]
