"""Steps by graphs: what is made at warm-up, and how a step runs through it.

A step is dispatched, its inputs are padded to a graph's shape, then its attention metadata is built
and its values are written into the static buffers; what stands for the model then replays. Owned by
the model runner, used on its thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from hardpoint.errors import LifecycleError

from hardpoint_runtime.forward_context import ForwardContext, entered
from hardpoint_runtime.graphs.captured import CapturedGraphs, CaptureReport
from hardpoint_runtime.graphs.dispatcher import Dispatch, Dispatcher
from hardpoint_runtime.graphs.dummy_batches import dummy_batch
from hardpoint_runtime.graphs.errors import GraphBufferError
from hardpoint_runtime.graphs.identity import Current, Identities, place
from hardpoint_runtime.graphs.keys import BatchKey
from hardpoint_runtime.graphs.modes import GraphMode
from hardpoint_runtime.graphs.piecewise import PiecewiseGraph, capture_pieces
from hardpoint_runtime.graphs.plan import Capture, GraphPlan
from hardpoint_runtime.graphs.recorded import GraphPool
from hardpoint_runtime.graphs.recording import record, require_same
from hardpoint_runtime.graphs.static_buffers import StaticBatch, StaticBuffers
from hardpoint_runtime.graphs.statistics import GraphCounts

if TYPE_CHECKING:
    from hardpoint.messages import GraphStats

    from hardpoint_runtime.batch.inputs import BatchInputs
    from hardpoint_runtime.device import DeviceOps, Graph
    from hardpoint_runtime.model_runner import TorchModelRunner
    from hardpoint_runtime.models.language_model import Carried

_logger = logging.getLogger("hardpoint.graphs")


class StepGraphs:
    """The graphs of one runner. Built by ``TorchModelRunner.make_graphs`` when the KV cache is
    there, filled by :meth:`capture_all`.
    """

    def __init__(self, runner: TorchModelRunner, plan: GraphPlan) -> None:
        self.plan = plan
        self.dispatcher = Dispatcher(plan)
        self.counts = GraphCounts(plan)
        self.captured: CapturedGraphs[ReplayedModel] = CapturedGraphs(plan)
        self.longest = runner.max_model_len
        self._runner = runner
        self._device = device = runner.device
        self._block_sizes = tuple(builder.block_size for builder in runner.builders)
        self._buffers = _make_buffers(runner, plan)
        self.report = CaptureReport()
        self._identities: Identities | None = None
        self._pool = device.graph_pool()
        self._scratch = GraphPool(lambda num_bytes: device.allocate(num_bytes, "graphs"))

    # Warm-up.

    def capture_all(self) -> CaptureReport:
        """Make every graph of the plan; called once, in the device's gradient mode. Scratch memory
        is where it will be before the first is made, and is locked from then on.

        Raises GraphCaptureError for a model that cannot be captured.
        """
        for capture in self._largest_whole():
            self._run_eagerly(capture)
        self._runner.workspace.lock()
        self.report = report = self.captured.capture_all(
            self._run_eagerly,
            self._capture,
            warm_ups=self._runner.config.graph.graph_warm_ups,
            memory=self._held,
        )
        self._identities = Identities(self._watched(), self._runner.get_model())
        _logger.info(
            "%d graphs (mode %s, up to %d tokens) in %.2f s, holding %d bytes",
            report.graphs, self.plan.mode.value, self.plan.largest, report.seconds,
            report.num_bytes,
        )  # fmt: skip
        return report

    def _largest_whole(self) -> Iterator[Capture]:
        """Give the largest FULL graph of each kind: what its attention asks for, no eager step may
        have asked for. PIECEWISE graphs hold what eager steps do.
        """
        kinds = set()
        for capture in self.plan.captures():
            if capture.mode is GraphMode.FULL and capture.key.uniform not in kinds:
                kinds.add(capture.key.uniform)
                yield capture

    def _run_eagerly(self, capture: Capture) -> None:
        """Run the batch of a capture as it will be captured: what is made once is made now."""
        self._prepared(capture)()

    def _capture(self, capture: Capture) -> ReplayedModel:
        run = self._prepared(capture)
        other = self._prepared(capture, other=True) if capture in self._rehearsed else None
        graph: PiecewiseGraph | Graph
        if capture.mode is GraphMode.PIECEWISE:
            recording = record(run, cuts=True)
            if other is not None:
                require_same(recording, record(other, cuts=True))
            graph = capture_pieces(
                recording, capture.key, run.step.attention, self._device, self._pool, self._scratch
            )
        else:
            graph = self._device.capture(run, capture.key, pool=self._pool, rehearsal=other)
        return ReplayedModel(
            graphs=self,
            capture=capture,
            graph=graph,
            batch=run.batch,
            metadata=tuple(_metadata_places(run)),
        )

    def _prepared(self, capture: Capture, *, other: bool = False) -> PreparedRun:
        """Load a batch of the shape into the static buffers; return the run of the model over it.

        Its metadata is new, so that nothing that was derived outside the capture is found in it.
        """
        runner = self._runner
        inputs = dummy_batch(
            capture,
            uniform_query=self.plan.rules.uniform_query,
            most_rows=self.plan.rules.max_num_seqs,
            longest=self.longest,
            block_sizes=self._block_sizes,
            other=other,
        )
        key = capture.key
        query = self.plan.rules.uniform_query if key.uniform else key.num_tokens
        batch = self._buffers.batch(key.num_tokens, key.num_reqs, query)
        write_tokens(self._device, inputs, batch)
        step = runner.make_forward_context(inputs, batch)
        return PreparedRun(model=runner.get_model(), batch=batch, step=step)

    @functools.cached_property
    def _rehearsed(self) -> frozenset[Capture]:
        """One capture of each kind: a small one, yet of more than one token if there is one."""
        kinds: dict[tuple[GraphMode, bool], Capture] = {}
        for capture in self.plan.captures():
            kind = capture.mode, capture.key.uniform
            if capture.key.num_tokens > 1 or kind not in kinds:
                kinds[kind] = capture
        return frozenset(kinds.values())

    def _held(self) -> int:
        """Return the bytes that graphs hold, as far as it is known."""
        pool = self._pool
        other = pool.num_bytes if isinstance(pool, GraphPool) else self._device.memory_held()
        return self._scratch.num_bytes + other

    def _watched(self) -> dict[str, Current]:
        """Return what graphs read wherever it is: by name, how to find it now."""
        watched: dict[str, Current] = {}
        for name, tensor in self._buffers.named():
            watched[f"static buffer {name}"] = functools.partial(_same, tensor)
        runner = self._runner
        for layer in runner.kv_cache.layers if runner.kv_cache else ():
            for part in ("key", "value"):
                watched[f"the {part} cache of {layer}"] = functools.partial(
                    _cache, runner, layer, part
                )
        for prefix, module in runner.get_model().named_modules():
            for kind in ("_parameters", "_buffers"):
                tensors = getattr(module, kind)
                for name, tensor in tensors.items():
                    if tensor is not None:
                        watched[f"weight {prefix}.{name}"] = functools.partial(
                            tensors.__getitem__, name
                        )
        return watched

    # One step.

    def dispatch(self, num_tokens: int, num_reqs: int, max_query: int) -> Dispatch:
        """Return how a batch runs."""
        return self.dispatcher.dispatch(num_tokens, num_reqs, max_query)

    def find(self, dispatch: Dispatch | None) -> ReplayedModel | None:
        """Return what stands for the model in a batch of this dispatch; None: it runs eagerly."""
        return None if dispatch is None else self.captured.find(dispatch.mode, dispatch.key)

    def count(self, inputs: BatchInputs) -> GraphStats | None:
        """Count a step; return what its output says of it."""
        if inputs.dispatch is None:
            return None
        return self.counts.step(inputs.dispatch, len(inputs.row_of_token))

    def replay(
        self, graph: PiecewiseGraph | Graph, key: BatchKey, step: ForwardContext
    ) -> torch.Tensor | Carried:
        """Replay what was loaded. Raises GraphBufferError if memory is not what it was at capture,
        CancelledStepError if the step was ended.
        """
        if self._identities is None:
            raise LifecycleError("a graph was replayed before all were captured")
        step.raise_if_cancelled()
        self._identities.check(self._runner.get_model())
        out: torch.Tensor | Carried
        if isinstance(graph, PiecewiseGraph):
            out = graph.replay(self._device, step.attention, step.raise_if_cancelled)
        else:
            self._device.before_replay(key, step.attention)
            out = self._device.replay(graph)
        return out

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self.captured.clear()
        self._identities = None
        self._scratch.blocks.clear()
        self._pool = None


@frozen(kw_only=True, eq=False)
class ReplayedModel:
    """Stands for the model in batches of one graph: is called as a model is, and replays."""

    graphs: StepGraphs
    capture: Capture
    graph: PiecewiseGraph | Graph
    batch: StaticBatch
    metadata: tuple[MetadataPlace, ...] = ()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext,
        rows: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """Return hidden states as the model does, valid until the next replay of any graph.

        ``token_ids`` and ``positions`` must be the static buffers, and in a FULL graph the metadata
        must be where it was at the capture; raises GraphBufferError for others.
        """
        for name, given, own in (
            ("token_ids", token_ids, self.batch.token_ids),
            ("positions", positions, self.batch.positions),
        ):
            if given is not own:
                raise GraphBufferError(
                    f"{name} is another tensor than the static buffer that the graph for "
                    f"{self.capture.key} reads; write the values into that"
                )
        for layer, name, before in self.metadata:
            if place(getattr(step.attention[layer], name)) != before:
                raise GraphBufferError(
                    f"{name} in the attention metadata of {layer} is another tensor than the "
                    f"static buffer that the graph for {self.capture.key} reads; write the values "
                    "into that"
                )
        for name, tensor in (carried or {}).items():
            self.batch.carried[name].copy_(tensor)
        out = self.graphs.replay(self.graph, self.capture.key, step)
        if rows is None or not isinstance(out, torch.Tensor):
            return out
        return out.index_select(0, rows)

    def carried_shapes(self, num_tokens: int) -> Mapping[str, tuple[int, ...]]:
        """See :class:`LanguageModel`."""
        return {name: tuple(tensor.shape) for name, tensor in self.batch.carried.items()}


@frozen(kw_only=True, eq=False)
class PreparedRun:
    """A run of the model over static buffers that hold a batch."""

    model: Callable[..., Any]
    batch: StaticBatch
    step: ForwardContext

    def __call__(self) -> Any:
        """Run it, deriving from its metadata anew: a capture must hold all the work of a step, also
        after the same run was looked at.
        """
        for metadata in self.step.attention.values():
            metadata.forget()
        batch, carried = self.batch, dict(self.batch.carried) or None
        with entered(self.step):
            return self.model(batch.token_ids, batch.positions, self.step, None, carried)


MetadataPlace = tuple[str, str, int]
"""A layer, the name of a tensor in its attention metadata, and the place of that tensor."""

METADATA_BUFFERS = ("query_start_device", "seq_lens_device", "block_table", "slots", "positions")
"""What of its metadata attention reads in a FULL graph; see :attr:`AttentionMetadata.fixed`."""


def _metadata_places(run: PreparedRun) -> Iterator[MetadataPlace]:
    """Give where a FULL graph finds its metadata; once for all layers that share theirs."""
    seen = set()
    for layer, metadata in run.step.attention.items() if run.batch.groups else ():
        if id(metadata) not in seen:
            seen.add(id(metadata))
            for name in METADATA_BUFFERS:
                yield layer, name, place(getattr(metadata, name))


def write_tokens(device: DeviceOps, inputs: BatchInputs, batch: StaticBatch) -> None:
    """Write a step's tokens into the static buffers of its graph."""
    device.write(batch.token_ids, inputs.token_ids)
    device.write(batch.positions, inputs.positions)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _cache(runner: TorchModelRunner, layer: str, part: str) -> torch.Tensor:
    if runner.kv_cache is None:
        raise LifecycleError("a graph was replayed without a KV cache")
    cache: torch.Tensor = getattr(runner.kv_cache.layers[layer], part)
    return cache


def _make_buffers(runner: TorchModelRunner, plan: GraphPlan) -> StaticBuffers:
    rows = max((each.key.num_reqs or 0 for each in plan.graphs), default=0)
    tokens = plan.largest
    seat = runner.seat
    shapes = {} if seat.is_first_stage else runner.get_model().carried_shapes(tokens)
    return StaticBuffers(
        runner.device,
        tokens=tokens,
        rows=rows,
        columns=[-(-runner.max_model_len // builder.block_size) for builder in runner.builders],
        carried=shapes,
        dtype=runner.dtype,
    )
