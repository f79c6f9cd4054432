"""The ModelRunner contract: loads a model, describes its KV cache, executes steps and samples.

Built and owned by a Worker, in the worker's process, and called by it on the thread that serves
calls; by nobody else. The runner holds the worker-side cache of the requests (block tables, tokens)
that the messages keep current. What a method raises is that of the Worker's method which called it.
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
    """Executes steps on one rank's devices.

    ``other_calls`` is the worker's (:attr:`hardpoint.worker.Worker.other_calls`), where it hands it
    on; None means that anything may have happened since the last step.
    """

    other_calls: int | None = None

    @abstractmethod
    def load_model(self) -> LoadReport:
        """Construct the model and load its weights. Called once by ``Worker.load_model``."""

    @abstractmethod
    def get_model(self) -> object:
        """Return the model; raises LifecycleError before ``load_model``."""

    @abstractmethod
    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return layer name -> what the layer keeps of each block, for the layers of this rank;
        ``page_bytes`` in bytes. After ``load_model``.
        """

    @abstractmethod
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate ``num_blocks`` blocks for each group and bind them to its layers. Called once by
        ``Worker.initialize_from_config``. Raises MemoryBudgetError with the bytes.
        """

    @abstractmethod
    def warm_up(self) -> WarmUpReport:
        """Run the shapes worth preparing, and say how many seconds that took. Later outputs are as
        if it had not run. Called by ``Worker.compile_or_warm_up_model``.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepTicket:
        """Run one step in the order: forget finished, zero and copy blocks, add new, update
        running, forward, sample.

        Token j of a request's chunk has position ``num_computed + j``; its key and value go to
        place ``position % block_size`` of block ``block_ids[group][position // block_size]``. It
        attends to the positions up to its own, in that request alone. A request whose
        ``num_computed + num_tokens`` is below its known tokens is not sampled (its row is empty); a
        drawn one draws by (seed, position), see :mod:`hardpoint.draws`. ``total_tokens`` may be 0.

        Raises MessageError for a plan that contradicts itself or what this rank knows. With
        ``defer_sampling`` the logits are kept and a ticket is returned.
        """

    @abstractmethod
    def sample_tokens(self, ticket: StepTicket, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the step of ``ticket``. Raises LifecycleError if that step is not the one that is
        waiting.
        """
