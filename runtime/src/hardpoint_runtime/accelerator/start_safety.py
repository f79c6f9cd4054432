"""Whether workers of an accelerator may be forked of a nursery. Imports no torch: platforms ask."""

from __future__ import annotations

import sys

from hardpoint.records import ForkSafety


def fork_safety(device_type: str) -> ForkSafety:
    """Return what ``Platform.fork_safe`` says for torch's device ``device_type``.

    The nursery is a program of its own, which imports and never takes a device, and each worker
    takes its own after the fork. What this process has taken is not handed on; a process that was
    itself forked of one that had the device is a different matter, as nothing is known of it.
    """
    module = sys.modules.get(f"torch.{device_type}")
    if module is None:
        return ForkSafety(safe=True, reason=f"torch.{device_type} is not loaded in the driver")
    asked = getattr(module, "_is_in_bad_fork", None)
    if asked is not None and asked():
        return ForkSafety(
            safe=False,
            reason=f"this process was forked of one that had initialised torch.{device_type}",
        )
    return ForkSafety(
        safe=True, reason="workers are forked of a nursery, which never takes the device"
    )
