"""Which kernels are offered as named operations, and why one cannot serve. Imports no kernel.

A platform's plugin returns them from its hook ``hardpoint_operations``::

    @hookimpl
    def hardpoint_operations():
        from hardpoint_runtime.kernels.offers import kernel_operations

        return kernel_operations("acme")
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

from hardpoint.records import Operation

LEAST = (3, 4)
"""The first version of Triton whose language the kernels are written in."""
DTYPES = ("float32", "bfloat16", "float16")
LARGEST_HEAD = 256
"""Head size up to which tiles stay in registers on every device that is compiled for."""
KERNELS: Mapping[str, str] = {
    "kv_write": "kv_write:kv_write",
    "attention": "attention:attention",
    "slot_mapping": "slots:slot_mapping",
    "zero_blocks": "blocks:zero_blocks",
    "copy_blocks": "blocks:copy_blocks",
    "penalise": "penalties:penalise",
    "temper": "filters:temper",
    "truncate": "filters:truncate",
    "draw_truncated": "filters:draw_truncated",
    "accept_greedy": "rejection:accept_greedy",
    "accept_drawn": "rejection:accept_drawn",
}
"""Operations by their kernels, in this package."""
OF_NUMBERS = ("kv_write", "attention")
"""Those that compute in the model's type."""


def kernel_operations(platform: str) -> tuple[Operation, ...]:
    """Return the offers of every kernel for ``platform``."""
    return tuple(
        Operation(
            name=name,
            reference=f"{__package__}.{reference}",
            platform=platform,
            supports=reason_against_numbers if name in OF_NUMBERS else reason_against,
        )
        for name, reference in KERNELS.items()
    )


def reason_against(description: Mapping[str, object]) -> str | None:
    """Return why no kernel can run in this process, or None: Triton is absent, too old, or has no
    driver for the device.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'hardpoint-runtime[kernels]'"
    triton = importlib.import_module("triton")
    version = triton.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        wanted = ".".join(map(str, LEAST))
        return f"Triton {version} is older than {wanted}: pip install 'triton>={wanted}'"
    if triton.knobs.runtime.interpret:
        return None
    if description.get("device") == "cpu":
        return "Triton compiles for no processor"
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001 - drivers raise whatever their libraries do
        return f"Triton has no driver for {description.get('device')}: {error}"
    return None


def reason_against_numbers(description: Mapping[str, object]) -> str | None:
    """Return also why the kernels cannot compute with the model's types and sizes; ``description``
    is that of :func:`hardpoint_runtime.operations.resolve`.
    """
    for key in ("dtype", "kv_cache_dtype"):
        if description.get(key) not in DTYPES:
            return f"{key} {description.get(key)} is none of {', '.join(DTYPES)}"
    if (size := description.get("head_size")) and int(str(size)) > LARGEST_HEAD:
        return f"head size {size} is above {LARGEST_HEAD}"
    return reason_against(description)
