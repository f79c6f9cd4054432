"""The ModelRunner suite: what comes out of steps, against an oracle. Runs through an executor."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_conformance.model_runner.adapters import AdapterTests
from hardpoint_conformance.model_runner.batches import BatchTests
from hardpoint_conformance.model_runner.draws import DrawTests
from hardpoint_conformance.model_runner.features import FeatureTests
from hardpoint_conformance.model_runner.forward import ForwardTests
from hardpoint_conformance.model_runner.histories import HistoryTests
from hardpoint_conformance.model_runner.scores import ScoreTests


class ModelRunnerSuite(
    ForwardTests, BatchTests, HistoryTests, DrawTests, ScoreTests, FeatureTests, AdapterTests
):
    """Greedy ids and scores, batches, chunks, preemption, prefixes, draws, masks, extras."""

    contract: ClassVar[str] = "model runner"
