"""rpc.pickle = "never": what travels, what does not, and that nothing is unpickled on the way."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import attrs
import msgpack
import pytest
from attrs import evolve, frozen
from hardpoint.adapters import LoRARequest
from hardpoint.config.schema import Config, RpcConfig
from hardpoint.errors import ConfigError, EncodingError, LifecycleError, UnsupportedError
from hardpoint.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec, KVCacheTensor
from hardpoint.messages import (
    CachedRequestData,
    Logprobs,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    StepTicket,
)
from hardpoint.records import LoadReport, Problem, SavedFile, WorkerHealth
from hardpoint.references import WrongClassError
from hardpoint.rpc import codec
from hardpoint.rpc.calls import Call
from hardpoint.rpc.encoding import PickleCodec, codec_named, codec_of
from hardpoint.rpc.failures import RemoteFailure
from hardpoint.rpc.network.hub import codec_across
from hardpoint.rpc.typed_codec import MODULES, TypedCodec, UntypedError
from hardpoint.sampling_params import SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

TYPED = TypedCodec()
SPEC = KVCacheSpec(block_size=4, num_kv_heads=1, head_size_k=8, head_size_v=8, dtype="float32")

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False)
)  # fmt: skip
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner)
    | st.sets(st.integers()) | st.frozensets(st.text()),
    max_leaves=15,
)  # fmt: skip


def same(one, other):
    """Equal, and of the same types all the way down."""
    assert type(one) is type(other)
    assert one == other
    if isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, dict):
        for key, value in one.items():
            same(value, other[key])


def back(value):
    return TYPED.decode(TYPED.encode(value, "v").data, "v")


@settings(deadline=None)
@given(plain)
def test_plain_data_arrives_equal_and_of_the_same_types(value):
    same(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**64, -(2**63) - 1, 10**400, "\ud800", Path("/a/b"), float("inf"), True, b"", (),
        KVCacheKind.SLIDING, SPEC, StepTicket(step_id=3), LoadReport(weight_bytes=1, seconds=0.5),
        LoRARequest(id=1, name="a", path="/x"), WorkerHealth(rank=0, step_id=1, busy_since=None),
        SavedFile(name="f", sha256="0", num_bytes=2), SamplingParams(temperature=0.5, seed=2**63),
        Problem(key="a", value=(1,), message="m"), Config(rpc=RpcConfig(pickle="never")),
        KVCacheConfig(
            num_blocks=3,
            groups=(KVCacheGroup(layers=("a",), spec=SPEC),),
            tensors=(KVCacheTensor(num_bytes=8, layers=("a",)),),
        ),
        SchedulerOutput(
            step_id=1,
            new=(NewRequestData(req_id="r", prompt=(1, 2), sampling=SamplingParams(seed=1),
                                block_ids=((1, 2),), extra={"x": {"y": [1]}}),),
            running=CachedRequestData(req_ids=("q",), new_blocks=(None,), num_computed=(3,)),
            num_tokens={"r": 2, "q": 1}, total_tokens=3, finished=frozenset({"z"}),
        ),
        ModelRunnerOutput(
            step_id=1, req_ids=("r",), tokens=((5,),),
            logprobs={"r": Logprobs(ids=((5,),), values=((-0.5,),), ranks=((1,),), num_best=0)},
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_and_records_arrive_equal(value):
    same(back(value), value)


def test_every_record_of_the_contracts_is_known():
    """A record that is added to these modules travels; one that cannot be rebuilt is found here."""
    known = set(TYPED._classes.values())
    for kind in (SchedulerOutput, ModelRunnerOutput, KVCacheConfig, Config, SamplingParams):
        assert kind in known
    for kind in known:
        assert kind.__module__ in MODULES
        assert attrs.has(kind) or issubclass(kind, Enum)


@frozen
class Foreign:
    held: int = 1


class Sub(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: 0, "v"),
        ([1, {"a": (2, print)}], r"v\[1\]\['a'\]\[1\]"),
        ({"a": Foreign()}, r"v\['a'\]"),
        (
            evolve(SchedulerOutput(step_id=1), extra={"p": {"q": object()}}),
            r"v.extra\['p'\]\['q'\]",
        ),
        (ValueError("x"), "v"),
        ([Sub("x")], r"v\[0\]"),
        ({Foreign(): 1}, r"v.keys"),
        (Foreign, "v"),
        (iter([]), "v"),
    ],
)
def test_what_is_not_known_is_refused_by_its_path(value, path):
    with pytest.raises(UntypedError, match=rf"\({path}.*\).*plain data") as caught:
        TYPED.encode(value, "v")
    assert isinstance(caught.value, UnsupportedError)
    assert isinstance(caught.value, EncodingError)
    assert 'rpc.pickle = "local"' in str(caught.value)


class InUse:
    """A registry whose platform declares messages."""

    def __init__(self, *messages: str) -> None:
        self.messages = messages

    def used(self, kind):
        record = SimpleNamespace(messages=self.messages)
        return (SimpleNamespace(record=record),) if kind == "platform" else ()


def test_what_a_plugin_declares_travels_too():
    both = codec_of(Config(rpc=RpcConfig(pickle="never")), InUse(f"{__name__}:Foreign"))
    assert both.decode(both.encode({"a": Foreign(held=3)}, "v").data, "v") == {"a": Foreign(held=3)}
    with pytest.raises(EncodingError, match="no record that travels"):
        TYPED.decode(both.encode(Foreign(), "v").data, "v")


def test_what_a_plugin_declares_must_be_a_record():
    with pytest.raises(WrongClassError, match="'pathlib:Path' is no attrs class"):
        TypedCodec().learn(InUse("pathlib:Path"))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_noise_is_an_encoding_error_or_plain_data(data):
    try:
        TYPED.decode(data, "v")
    except EncodingError as error:
        assert str(error).startswith("v was sent")  # noqa: PT017


@pytest.mark.parametrize("record", [6, 7])
@pytest.mark.parametrize(
    "content",
    [["os:system", "touch x"], ["builtins:eval", "1"], ["hardpoint.errors:ConfigError", "x"],
     ["pathlib:Path", "x"], [], "text", ["hardpoint.records:LoadReport"],
     ["hardpoint.records:LoadReport", 1, 2, 3], ["hardpoint.kv_cache:KVCacheKind", "NOT_ONE"],
     ["hardpoint.kv_cache:KVCacheKind", "__class__"]],
    ids=repr,
)  # fmt: skip
def test_a_name_that_is_no_record_leads_to_nothing(record, content):
    data = msgpack.packb({"a": msgpack.ExtType(record, msgpack.packb(content))})
    with pytest.raises(EncodingError):
        TYPED.decode(data, "v")


def test_depth_is_bounded_both_ways():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(EncodingError):
        TYPED.encode(value, "v")
    while value:
        value = value.pop()
    nested = msgpack.packb([])
    for _ in range(5000):
        nested = msgpack.packb(msgpack.ExtType(1, nested))[:]
    with pytest.raises(EncodingError):
        TYPED.decode(nested, "v")


# Failures.


def test_of_an_exception_the_text_travels_and_hardpoints_own_are_raised_again():
    try:
        try:
            raise LifecycleError("load first")
        except LifecycleError as error:
            raise ConfigError(
                "wrong", problems=(Problem(key="k", value=1, message="m"),)
            ) from error
    except ConfigError as error:
        failure = RemoteFailure.of(error, encode=TYPED.encode_exception)
    assert failure.encoded is None
    raised = back(failure).raised_by(1, "m")
    assert "wrong" in str(raised)
    assert type(raised.__cause__) is ConfigError
    assert raised.__cause__.args == ("wrong",)
    assert type(raised.__cause__.__cause__) is LifecycleError
    other = RemoteFailure.of(ValueError("v"), encode=TYPED.encode_exception)
    assert back(other).raised_by(0, "m").__cause__ is None
    assert "ValueError" in str(back(other).raised_by(0, "m"))


def test_a_failure_that_brings_something_to_unpickle_is_refused():
    failure = RemoteFailure.of(ValueError("v"))
    assert failure.encoded is not None
    assert back(failure).encoded is None, "it is left behind by who sends"
    name = "hardpoint.rpc.failures:RemoteFailure"
    fields = [getattr(failure, each.name) for each in attrs.fields(RemoteFailure)]
    packed = msgpack.packb([name, *fields])
    with pytest.raises(EncodingError, match="not opened here"):
        TYPED.decode(msgpack.packb(msgpack.ExtType(6, packed)), "v")


# Within a process, and by configuration.


def test_the_configuration_chooses_the_codec():
    assert isinstance(codec_of(Config()), PickleCodec)
    assert isinstance(codec_of(Config(rpc=RpcConfig(pickle="never"))), TypedCodec)
    assert type(codec_named("typed")) is TypedCodec
    with pytest.raises(UnsupportedError):
        codec_named("other")


def test_within_a_process_too_mutable_values_are_copies_and_nothing_is_pickled(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a pickler was reached")

    for name in ("dumps", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(codec.cloudpickle, "dumps", never)
    value = {"a": [1, (2,)]}
    parcel = TYPED.pack(value, "v")
    assert codec.unpack(parcel, "v") == value
    assert codec.unpack(parcel, "v") is not value
    step = SchedulerOutput(step_id=1)
    call = Call(call_id=1, generation=0, method="execute_model", args=(step,))
    assert codec.unpack(call.pack(TYPED).body, "arguments")[1][0] is step
    call = Call(call_id=1, generation=0, method="m", args=([1],), kwargs={"k": {2}})
    assert codec.unpack(call.pack(TYPED).body, "arguments") == ("m", ([1],), {"k": {2}})
    call = Call(call_id=1, generation=0, method=lambda worker: 1)
    with pytest.raises(UntypedError, match="a callable"):
        call.pack(TYPED)


@pytest.mark.parametrize("value", [print, object()])
def test_what_does_not_cross_hosts_blames_no_configuration(value):
    """There no configuration lets it travel."""
    across = codec_across()
    assert across.decode(TYPED.encode({"a": (1,)}, "v").data, "v") == {"a": (1,)}
    with pytest.raises(UntypedError, match=r"the way to another host does not support a") as caught:
        across.encode({"held": value}, "v")
    assert "(v['held'])" in str(caught.value)
    assert "rpc.pickle" not in str(caught.value)
    assert "call workers by a method's name" in str(caught.value)
