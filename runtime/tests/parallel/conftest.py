"""Ranks as threads of the test's process, meeting in an anonymous file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hardpoint.checkpoints.description import ModelDescription
from hardpoint_runtime.device import TorchDeviceOps
from hardpoint_runtime.parallel.communicator import Meeting
from hardpoint_runtime.parallel.groups import Axis, Topology
from hardpoint_runtime.parallel.host import host_communicator

PATIENCE = 60.0
"""Seconds after which a test has failed that waits for what must come."""


@pytest.fixture
def rendezvous():
    descriptor = os.memfd_create("test-rendezvous")
    yield f"file:///proc/self/fd/{descriptor}"
    os.close(descriptor)


@pytest.fixture(params=["shared_memory", "gloo", "staged"])
def any_kind(request):
    return request.param


@pytest.fixture(params=["shared_memory", "gloo"])
def kind(request):
    return request.param


class Ranks:
    """Runs one function on every rank of a group, each on a thread of its own."""

    def __init__(self, rendezvous, kind):
        self.rendezvous = rendezvous
        self.kind = kind

    def join(self, size, rank, axis=Axis.TENSOR, **keys):
        group = evolve(Topology(tensor=size).group_of(Axis.TENSOR, rank), axis=axis)
        meeting = Meeting(
            rank=rank, rendezvous=self.rendezvous, **{"timeout": PATIENCE, "spin": 0.0, **keys}
        )
        if self.kind == "staged":
            return TorchDeviceOps("cpu", None).make_communicator(group, meeting)
        return host_communicator(group, meeting, self.kind)

    def run(self, size, function, **keys):
        """Return what ``function(communicator)`` returned or raised, in rank order."""

        def one(rank):
            torch.set_num_threads(1)
            try:
                communicator = self.join(size, rank, **keys)
            except Exception as error:
                return error
            try:
                return function(communicator)
            except Exception as error:
                return error
            finally:
                communicator.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))


@pytest.fixture
def ranks(rendezvous, kind):
    return Ranks(rendezvous, kind)


@pytest.fixture
def any_ranks(rendezvous, any_kind):
    return Ranks(rendezvous, any_kind)


@pytest.fixture
def memory_ranks(rendezvous):
    return Ranks(rendezvous, "shared_memory")


@pytest.fixture
def failing():
    """Return a function that raises, as a test's own, what one of the results is."""

    def check(results):
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return check


@pytest.fixture
def later():
    """Start functions on threads; joined after the test."""
    started = []

    def start(function, *args):
        thread = threading.Thread(target=function, args=args, daemon=True)
        started.append(thread)
        thread.start()
        return thread

    yield start
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture
def odd_llama():
    """A shape that hardly any number divides: 6 query and 3 key-value heads, 5 layers."""
    return ModelDescription(
        path=Path("odd"),
        format="dummy",
        architecture="LlamaForCausalLM",
        num_layers=5,
        hidden_size=36,
        intermediate_size=50,
        num_heads=6,
        num_kv_heads=3,
        head_size=8,
        vocab_size=101,
        context_length=64,
        stored_dtype="float32",
        hf_config={"rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    )
