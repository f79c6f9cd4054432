"""Which sampling parameters this toolkit honours; what is missing is refused before queueing.

Torch platforms call :func:`unsupported` from ``Platform.check_request`` in the driver, so this
module imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.platform import refused

if TYPE_CHECKING:
    from hardpoint.records import Problem
    from hardpoint.sampling_params import SamplingParams

NOT_YET = {
    "extra_args": "no logits processor is there to take them",
}
"""Parameter -> why it is refused."""


def unsupported(sampling: SamplingParams) -> Problem | None:
    """Return the first parameter that would be ignored if the request were run, or None."""
    return refused(sampling, NOT_YET)
