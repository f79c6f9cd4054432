"""A part that a vendor's runner or worker forgets to return is named where it was to be made."""

from __future__ import annotations

import pytest
from hardpoint.errors import IncompatiblePluginError
from hardpoint_runtime.collaborators import made
from hardpoint_runtime.model_runner import TorchModelRunner


@pytest.mark.parametrize(
    "method",
    ["make_operations", "make_model", "make_kv_cache", "make_requests",
     "make_metadata_builders", "make_sampler"],
)  # fmt: skip
def test_a_part_that_is_not_returned_is_named(make_runner, method):
    def forgetful(runner, *args):
        getattr(TorchModelRunner, method)(runner, *args)

    forgetful.__qualname__ = f"AcmeModelRunner.{method}"
    forgetful_runner = type("AcmeModelRunner", (TorchModelRunner,), {method: forgetful})
    with pytest.raises(IncompatiblePluginError, match=f"AcmeModelRunner.{method} returned None"):
        make_runner(forgetful_runner)


def test_what_is_made_is_handed_on():
    assert made(lambda start, *, end: [start, end], 1, end=2) == [1, 2]
