"""Patterns of file names: what tells two workers' files apart."""

from __future__ import annotations

import pytest
from hardpoint.config.schema import ParallelConfig
from hardpoint.errors import InvalidRequestError
from hardpoint.service_arguments import check_pattern


@pytest.mark.parametrize(
    ("pattern", "axes", "workers"),
    [
        ("{part}", (1, 1), 1), ("{part}", (4, 1), 1), ("{tp}-{part}", (2, 1), 2),
        ("{tp}-{pp}-{part}", (2, 3), 6), ("{pp}-{part}", (1, 3), 3), ("{rank}-{part}", (4, 2), 2),
    ],
)  # fmt: skip
def test_a_pattern_that_tells_workers_apart_is_taken(pattern, axes, workers):
    check_pattern(pattern, parallel(axes), workers)


@pytest.mark.parametrize(
    ("pattern", "axes", "workers", "lacking"),
    [
        ("{rank}", (1, 1), 1, "part"), ("{part}", (2, 1), 2, "tp"), ("{tp}{part}", (2, 3), 6, "pp"),
        ("{pp}-{part}", (4, 2), 2, "rank"), ("{tp}-{part}", (4, 1), 2, "rank"),
    ],
)  # fmt: skip
def test_a_pattern_by_which_two_files_have_one_name_is_refused(pattern, axes, workers, lacking):
    """A worker that owns several devices has no place of its own on their axis."""
    with pytest.raises(InvalidRequestError, match=rf"lacks \['{lacking}'\]"):
        check_pattern(pattern, parallel(axes), workers)


def parallel(axes):
    return ParallelConfig(tensor_parallel_size=axes[0], pipeline_parallel_size=axes[1])
