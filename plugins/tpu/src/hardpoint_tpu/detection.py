"""Is there a TPU here? Read from files, the environment and the metadata server; touches no device.

A chip is visible where its PCI function, its device file and the permission to open it are there,
and the environment does not hide it. All that is looked at comes in as values, for tests.
"""

from __future__ import annotations

import importlib.util
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from attrs import field, frozen

PCI_VENDOR: Final = "0x1ae0"
CHIP_NAMES: Final = MappingProxyType(
    {
        "0x0027": "TPU v3",
        "0x005e": "TPU v4",
        "0x0062": "TPU v5p",
        "0x0063": "TPU v5e",
        "0x006f": "TPU v6e",
        "0x0076": "TPU7x",
    }
)
"""PCI device number -> generation, as the PCI functions of Cloud TPU machines show them."""
HIDING: Final = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")
METADATA: Final = "http://169.254.169.254/computeMetadata/v1/instance/attributes/accelerator-type"
"""By its fixed address: a name would be looked up, for as long as that takes."""
PATIENCE: Final = 0.1
"""Seconds that the metadata server may take; it is on the same host as the machine that asks."""


def ask_metadata(url: str) -> str | None:
    """Return what the metadata server says under ``url``, None if it says nothing in time."""
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})  # noqa: S310
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=PATIENCE) as answer:
            return str(answer.read(200).decode("ascii", "replace")).strip()
    except (OSError, urllib.error.URLError, ValueError):
        return None


def has_module(name: str) -> bool:
    """Whether a package is installed; nothing is imported."""
    return importlib.util.find_spec(name) is not None


@frozen(kw_only=True)
class Surroundings:
    """What detection may look at."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(factory=lambda: dict(os.environ))
    installed: Callable[[str], bool] = has_module
    metadata: Callable[[str], str | None] = ask_metadata


@frozen(kw_only=True)
class Sighting:
    """The chips that can be used, by generation, and why there are no more: one reason a cause."""

    chips: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    accelerator_type: str | None = None


def look(around: Surroundings) -> Sighting:
    """Look for chips. Raises nothing; takes at most the metadata server's patience."""
    reasons = []
    if not around.installed("libtpu"):
        reasons.append("the package libtpu is not installed (pip install 'hardpoint-tpu[tpu]')")
    platforms = around.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        reasons.append(f"JAX_PLATFORMS={platforms} leaves TPUs out")
    functions = _pci_functions(around.root)
    files = _device_files(around.root)
    if not functions:
        reasons.append("no PCI function of a TPU is there")
    elif not files:
        reasons.append("no device file /dev/accel* or /dev/vfio/* is there")
    elif closed := [path for path in files if not os.access(path, os.R_OK | os.W_OK)]:
        reasons.append(f"{closed[0]} may not be opened by this user")
    chips = functions[: len(files)]
    hidden, chips = _unhidden(around.environ, chips)
    reasons += hidden
    accelerator = _accelerator_type(around)
    if accelerator and not functions:
        reasons.append(f"yet the metadata server names {accelerator}")
    return Sighting(
        chips=() if reasons else tuple(chips),
        reasons=tuple(reasons),
        accelerator_type=accelerator,
    )


def _pci_functions(root: Path) -> list[str]:
    folders = sorted((root / "sys/bus/pci/devices").glob("*"))
    ours = [folder for folder in folders if _read(folder / "vendor") == PCI_VENDOR]
    names = [CHIP_NAMES.get(_read(folder / "device")) for folder in ours]
    return [name for name in names if name is not None]


def _device_files(root: Path) -> list[Path]:
    accel = sorted((root / "dev").glob("accel[0-9]*"))
    return accel or sorted((root / "dev/vfio").glob("[0-9]*"))


def _unhidden(environ: Mapping[str, str], chips: list[str]) -> tuple[list[str], list[str]]:
    """Return why the environment hides every chip, if it does, and the chips it leaves."""
    for name in HIDING:
        chosen = environ.get(name)
        if chosen is None:
            continue
        ids = [part.strip() for part in chosen.split(",") if part.strip()]
        left = [chips[int(each)] for each in ids if each.isdigit() and int(each) < len(chips)]
        if chips and not left:
            return [f"{name}={chosen} hides every chip"], []
        return [], left
    return [], chips


def _accelerator_type(around: Surroundings) -> str | None:
    """Return what the metadata server of a Google machine calls the accelerator."""
    if around.environ.get("TPU_SKIP_MDS_QUERY") in ("1", "true"):
        return around.environ.get("TPU_ACCELERATOR_TYPE")
    if "Google" not in _read(around.root / "sys/class/dmi/id/product_name"):
        return None
    return around.metadata(METADATA)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
