"""Every mutant, in the order of the suites that must notice them."""

from __future__ import annotations

import broken_adapters
import broken_answers
import broken_choices
import broken_executor_lives
import broken_executors
import broken_platforms
import broken_plugins
import broken_runners
import broken_torch
import broken_workers
from mutation import Mutation, mutations_of

MODULES = (
    broken_plugins,
    broken_platforms,
    broken_workers,
    broken_runners,
    broken_choices,
    broken_answers,
    broken_adapters,
    broken_torch,
    broken_executors,
    broken_executor_lives,
)

MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for module in MODULES for mutation in mutations_of(module)
)
