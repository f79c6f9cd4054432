"""Intel GPUs as the kernel's drivers (i915, xe) show them in /sys/class/drm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from hardpoint_runtime.accelerator.surroundings import Surroundings

from hardpoint_xpu.bfloat16 import Family, family_of

VENDOR = "0x8086"
DRM = "sys/class/drm"
BY_ADDRESS = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"


@frozen(kw_only=True)
class Card:
    """One GPU: its PCI device number and address, what is known of it, its tiles and its memory in
    bytes (None where that is the host's, or not told).
    """

    number: str
    family: Family | None
    tiles: int = 1
    memory_bytes: int | None = None
    address: str = ""

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"Intel {self.family.name}" if self.family else f"Intel GPU {self.number}"


@frozen(kw_only=True)
class Found:
    """GPUs in Level Zero's order, or the reasons why none is to be had."""

    cards: tuple[Card, ...] = ()
    reasons: tuple[str, ...] = ()


def find_cards(around: Surroundings) -> Found:
    """Look for render nodes of this vendor; opens no device."""
    if around.has("dev/dxg"):
        return Found(cards=(Card(number="of the Windows host", family=None),))
    nodes = sorted((around.root / DRM).glob("renderD*"), key=lambda path: path.name)
    ours = [node for node in nodes if around.read(f"{DRM}/{node.name}/device/vendor") == VENDOR]
    if not ours:
        return Found(reasons=("no Intel GPU is there (/sys/class/drm/renderD*)",))
    closed = [node.name for node in ours if not _may_open(around, node.name)]
    if closed:
        return Found(
            reasons=(f"/dev/dri/{closed[0]} may not be opened by this user (group render)",)
        )
    return Found(cards=tuple(sorted((_card(around, node) for node in ours), key=_place(around))))


def _place(around: Surroundings) -> Callable[[Card], tuple[bool, str]]:
    """Return by what Level Zero orders GPUs: cards of their own before those of processors, unless
    it is told not to, then by PCI address (compute-runtime: ``comparePciIdBusNumber``).
    """
    by_address = around.environ.get(BY_ADDRESS, "0") not in ("", "0")
    return lambda card: (not by_address and card.memory_bytes is None, card.address)


def _may_open(around: Surroundings, name: str) -> bool:
    return os.access(around.root / "dev/dri" / name, os.R_OK | os.W_OK)


def _card(around: Surroundings, node: Path) -> Card:
    device = f"{DRM}/{node.name}/device"
    number = around.read(f"{device}/device") or "?"
    tiles = len(list((around.root / device).glob("tile[0-9]*"))) or 1
    uevent = (around.read(f"{device}/uevent") or "").splitlines()
    told = dict(line.split("=", 1) for line in uevent if "=" in line)
    return Card(
        number=number,
        family=family_of(number),
        tiles=tiles,
        memory_bytes=_memory(around, device),
        address=told.get("PCI_SLOT_NAME", ""),
    )


def _memory(around: Surroundings, device: str) -> int | None:
    """Return what i915 or xe tell of the card's own memory."""
    for path in sorted((around.root / device).glob("drm/card*/lmem_total_bytes")):
        text = path.read_text().strip()
        if text.isdecimal():
            return int(text)
    sizes = [
        int(text, 0)
        for path in sorted((around.root / device).glob("tile*/physical_vram_size_bytes"))
        if (text := path.read_text().strip())
    ]
    return sum(sizes) or None
