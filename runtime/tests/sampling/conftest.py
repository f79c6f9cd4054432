"""Requests whose next token is due, for the tests of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hardpoint.kv_cache import KVCacheConfig
from hardpoint.messages import NewRequestData
from hardpoint.sampling_params import SamplingParams
from hardpoint_runtime.batch.block_table import BlockTables
from hardpoint_runtime.batch.requests import Requests, make_columns
from hardpoint_runtime.device import HostDeviceOps
from hardpoint_runtime.sampling.batch import build_sampling_batch
from hardpoint_runtime.sampling.columns import SAMPLING_COLUMNS
from hardpoint_runtime.sampling.logprobs import LogprobsMode
from hardpoint_runtime.sampling.sampler import Sampled, Sampler

VOCABULARY = 50


def add(requests: Requests, name: str, sampling: SamplingParams, prompt=(1, 2), output=()) -> None:
    if sampling.seed is None:
        sampling = sampling.with_seed(0)
    known = tuple(prompt) + tuple(output)
    requests.add(
        NewRequestData(
            req_id=name,
            prompt=tuple(prompt),
            prefill_tokens=known if output else None,
            sampling=sampling,
            block_ids=(),
        )
    )


@pytest.fixture
def make_requests() -> Callable[..., Requests]:
    """Build requests from name -> parameters, or (parameters, prompt, output)."""

    def make(wishes: Mapping[str, object], longest: int = 64) -> Requests:
        columns = make_columns(longest, 2, SAMPLING_COLUMNS)
        plan = KVCacheConfig(num_blocks=1, groups=(), tensors=())
        requests = Requests(columns, BlockTables(columns, plan, max_model_len=longest), longest)
        for name, wish in wishes.items():
            add(requests, name, *(wish if isinstance(wish, tuple) else (wish,)))
        return requests

    make.add = add
    return make


@pytest.fixture
def sample(make_requests) -> Callable[..., Sampled]:
    """Sample rows of logits [n, V] for name -> wish; ``order`` picks and orders the rows."""

    def run(
        wishes: Mapping[str, object],
        logits: torch.Tensor,
        order: Sequence[str] | None = None,
        mode: str = "raw_logprobs",
        **more,
    ) -> Sampled:
        names = list(wishes)
        order = names if order is None else order
        rows = logits[[names.index(name) for name in order]]
        batch = build_sampling_batch(
            make_requests(wishes), order, vocab_size=logits.shape[1], **more
        )
        return Sampler(HostDeviceOps(), LogprobsMode.named(mode)).sample(rows, batch)

    return run
