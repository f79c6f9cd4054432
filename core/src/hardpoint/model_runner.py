"""The ModelRunner contract: loads a model, describes its KV cache, executes steps and samples.

Built and owned by a Worker, in the worker's process; called by nobody else. The runner holds the
worker-side cache of the requests (block tables, tokens) that the messages keep current.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardpoint.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.records import LoadReport, WarmUpReport

if TYPE_CHECKING:
    from hardpoint.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTicket


class ModelRunner(ABC):
    """Executes steps on one rank's devices."""

    @abstractmethod
    def load_model(self) -> LoadReport:
        """Construct the model and load its weights. Called once by ``Worker.load_model``."""

    @abstractmethod
    def get_model(self) -> object:
        """Return the model; raises LifecycleError before ``load_model``."""

    @abstractmethod
    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> what the layer keeps per block."""

    @abstractmethod
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate and bind the cache. Called once by ``Worker.initialize_from_config``."""

    @abstractmethod
    def warm_up(self) -> WarmUpReport:
        """Run the shapes worth preparing. Later outputs are as if it had not run."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step in the order: forget finished, zero and copy blocks, add new, update
        running, forward, sample.

        A request whose ``num_computed + num_tokens`` is below its known tokens is not sampled (its
        row is empty).
        """

    @abstractmethod
    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step of ``ticket``. Raises LifecycleError if that step is not the one that is
        waiting.
        """
