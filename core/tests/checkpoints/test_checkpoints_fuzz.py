"""Valid files, mutated: the readers answer with a CheckpointError or with sane tables, never with
anything else, and never take memory that the file does not justify.
"""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hardpoint.checkpoints import read_description
from hardpoint.checkpoints.gguf import GGUFFile
from hardpoint.checkpoints.safetensors import SafetensorsFile
from hardpoint.errors import CheckpointError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
MOST_MEMORY = 4 << 20  # the files here are below 128 KiB

EDGES = [0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 127, 128, 255, 256, 1 << 15, 1 << 16, 1 << 31]
EDGES += [(1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 63, (1 << 64) - 1]


@st.composite
def mutations(draw):
    """A list of (place, kind, value): places are fractions of the file's header."""
    return draw(
        st.lists(
            st.tuples(
                st.floats(0, 1, exclude_max=True),
                st.sampled_from(["byte", "u32", "u64", "cut", "insert", "copy"]),
                st.one_of(st.sampled_from(EDGES), st.integers(0, (1 << 64) - 1)),
            ),
            min_size=1,
            max_size=4,
        )
    )


def mutated(raw: bytes, header: int, changes) -> bytes:
    data = bytearray(raw)
    for fraction, kind, value in changes:
        place = int(fraction * min(header, len(data)))
        if kind == "byte":
            data[place : place + 1] = bytes([value & 255])
        elif kind in ("u32", "u64"):
            width = 4 if kind == "u32" else 8
            data[place : place + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == "cut":
            del data[place : place + value % 64]
        elif kind == "insert":
            data[place:place] = (value & 0xFFFF).to_bytes(2, "little")
        else:
            data[place : place + 32] = data[value % header : value % header + 32]
    return bytes(data)


class Outcome:
    accepted = 0
    refused = 0


def attempt(path: Path, read, outcome: Outcome) -> None:
    tracemalloc.start()
    try:
        read(path)
        outcome.accepted += 1
    except CheckpointError as error:
        outcome.refused += 1
        text = str(error)
        assert str(path.parent) in text
        assert "\n" not in text
        assert len(text) < 1500
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_MEMORY


def sane(file, size: int) -> None:
    spans = sorted((e.offset, e.offset + e.num_bytes) for e in file.tensors.values())
    assert all(0 <= begin <= end <= size for begin, end in spans)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for name in file.tensors:
        assert len(file.data(name)) == file.tensors[name].num_bytes


def read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        sane(file, path.stat().st_size)
        for key in file.metadata:
            file.metadata[key]
    read_description(path)


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        sane(file, path.stat().st_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", ["llama_gguf", "mixture_gguf", "factors_gguf"])
def test_gguf(folder, make, kind):
    raw = getattr(make, kind)()
    last = b"blk.1.ffn_down_exps.weight" if kind == "mixture_gguf" else b"blk.1.ffn_down.weight"
    header = raw.index(last) + 64
    outcome, path = Outcome(), folder / "m.gguf"
    path.write_bytes(raw)
    read_gguf(path)

    @FUZZ
    @given(mutations())
    def run(changes):
        path.write_bytes(mutated(raw, header, changes))
        attempt(path, read_gguf, outcome)

    run()
    assert outcome.refused > 40


def test_gguf_metadata(folder, make):
    """The key-value part alone, small, so that most mutations meet it."""
    keys = [
        ("a", 9, (8, ["x", "yy", "zzz"])),
        ("b", 9, (9, [(4, [1, 2]), (8, ["q"])])),
        ("c", 9, (7, [True, False])),
        ("d", 8, "text"),
        ("e", 10, 1 << 40),
    ]
    raw = make.gguf(keys, {"t": ((8,), 0, bytes(32))})
    outcome, path = Outcome(), folder / "k.gguf"

    def read(path: Path) -> None:
        with GGUFFile(path) as file:
            sane(file, path.stat().st_size)
            for key in file.metadata:
                file.metadata[key]

    path.write_bytes(raw)
    read(path)

    @FUZZ
    @given(mutations())
    def run(changes):
        path.write_bytes(mutated(raw, len(raw), changes))
        attempt(path, read, outcome)

    run()
    assert outcome.refused > 40
    assert outcome.accepted > 1


def test_safetensors_bytes(folder, make):
    raw = make.safetensors(
        {"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (4,), bytes(8))}, {"format": "pt"}
    )
    header = 8 + int.from_bytes(raw[:8], "little")
    outcome, path = Outcome(), folder / "m.safetensors"
    path.write_bytes(raw)
    read_safetensors(path)

    @FUZZ
    @given(mutations())
    def run(changes):
        path.write_bytes(mutated(raw, header, changes))
        attempt(path, read_safetensors, outcome)

    run()
    assert outcome.refused > 40


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([*EDGES, -1, 10**400]),
        st.floats(allow_nan=False),
        st.text(max_size=5),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(["F32", "BF16", "F4", "I64", "X"]) | VALUES
ROWS = st.fixed_dictionaries(
    {
        "dtype": KINDS,
        "shape": st.lists(st.sampled_from([0, 1, 2, 4, 1 << 40]), max_size=3) | VALUES,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)).map(list) | VALUES,
    }
)


def test_safetensors_tables(folder, make):
    outcome, path = Outcome(), folder / "t.safetensors"

    @FUZZ
    @given(
        st.dictionaries(st.text(max_size=5) | st.just("__metadata__"), ROWS | VALUES, max_size=3)
    )
    def run(header):
        raw = json.dumps(header).encode()
        path.write_bytes(make.with_header(raw, bytes(16)))
        attempt(path, read_safetensors, outcome)

    run()
    assert outcome.refused > 40


FILES = ["../x.safetensors", "model-00001-of-00002.safetensors", "a.safetensors", "\0.safetensors"]


def test_index(folder, make):
    home = make.folder(folder / "sharded", shards=2)
    path = home / "model.safetensors.index.json"
    valid = json.loads(path.read_text())
    names = [*list(valid["weight_map"])[:3], "other"]
    outcome = Outcome()

    @FUZZ
    @given(
        st.dictionaries(
            st.sampled_from(names) | st.text(max_size=5),
            st.sampled_from(FILES) | VALUES,
            min_size=1,
            max_size=3,
        ),
        st.booleans(),
    )
    def run(changes, nested):
        index = {**valid, "weight_map": {**valid["weight_map"], **changes}}
        path.write_text(json.dumps(index if nested else {**valid, **changes}))
        attempt(home, read_description, outcome)

    run()
    assert outcome.refused > 25
    assert outcome.accepted > 1


def test_config(folder, make):
    home = make.folder(folder / "config")
    path = home / "config.json"
    keys = [*make.config, "head_dim", "rope_scaling", "rope_parameters", "dtype", "hidden_act"]
    keys += ["attention_bias", "generation", "partial_rotary_factor", "quantization_config"]
    outcome = Outcome()

    @FUZZ
    @given(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3), st.booleans())
    def run(changes, weights):
        path.write_text(json.dumps({**make.config, **changes}))
        attempt(home, lambda f: read_description(f, "auto" if weights else "dummy"), outcome)

    run()
    assert outcome.refused > 40
    assert outcome.accepted > 1


def test_config_bytes(folder, make):
    home = make.folder(folder / "bytes")
    path = home / "config.json"
    raw = path.read_bytes()
    outcome = Outcome()

    @FUZZ
    @given(mutations())
    def run(changes):
        path.write_bytes(mutated(raw, len(raw), changes))
        attempt(home, read_description, outcome)

    run()
    assert outcome.refused > 40
