"""Static shapes, kept: nothing is traced after the warm-up, used-up buffers stay used up, and a
second start compiles nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hardpoint.errors import CancelledStepError, ConfigError
from hardpoint_tpu.buckets import Shape
from hardpoint_tpu.compilation_cache import Compilations, cache_folder, counted_compilations
from hardpoint_tpu.inputs import PieceInputs
from hardpoint_tpu.stages import RetraceError, Stage, StageSet

FEW = {"request_buckets": (2,), "token_buckets": (16,)}


@pytest.fixture(scope="module")
def worker(module_workers):
    return module_workers()


def test_a_stage_traces_once_for_each_key():
    stage = Stage("double", lambda x: x * 2)
    for _ in range(2):
        stage.compile(4, (jax.ShapeDtypeStruct((4,), jnp.float32),))
    stage.compile(8, (jax.ShapeDtypeStruct((8,), jnp.float32),))
    assert stage.traces == 2
    for _ in range(5):
        assert stage(4, np.ones(4, np.float32)).tolist() == [2] * 4
    assert stage.traces == 2


def test_a_shape_that_was_not_compiled_is_named():
    stages = StageSet()
    stages.add("double", lambda x: x * 2).compile(4, (jax.ShapeDtypeStruct((4,), jnp.float32),))
    with pytest.raises(RetraceError, match=r"'double' was not compiled for 5, only for 4;"):
        stages["double"](5, np.ones(5, np.float32))
    assert stages.traces == stages.shapes == {"double": 1}


def test_an_array_of_another_shape_under_a_known_key_is_an_error_too():
    stage = Stage("double", lambda x: x * 2)
    stage.compile(4, (jax.ShapeDtypeStruct((4,), jnp.float32),))
    with pytest.raises(TypeError, match=r"float32\[5\]"):
        stage(4, np.ones(5, np.float32))
    assert stage.traces == 1


def test_a_donated_array_cannot_be_used_afterwards():
    stage = Stage("add", lambda x, y: x + y, donated=(0,))
    array = jax.device_put(np.zeros(64, np.float32))
    kept = jax.device_put(np.ones(64, np.float32))
    stage.compile(0, (array, kept))
    result = stage(0, array, kept)
    assert array.is_deleted()
    assert not kept.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(array)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        stage(0, array, kept)
    assert result.tolist() == [1] * 64


def test_the_kv_cache_is_used_up_by_every_step(worker, drive):
    runner = worker.get_model_runner()
    before = runner.cache.take(0, 2)
    driver = drive(worker)
    driver.add("a", [1, 2, 3])
    driver.step({"a": 3})
    assert all(array.is_deleted() for layer in before for array in layer)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(before[0][0])
    assert not any(array.is_deleted() for layer in runner.cache.take(0, 2) for array in layer)


def test_a_retrace_after_warm_up_is_an_error_that_names_the_shape(worker):
    runner = worker.get_model_runner()
    zeros = np.zeros(3, np.int32)
    piece = PieceInputs(
        shape=Shape(3, 16), token_ids=np.zeros(48, np.int32),
        tables=np.zeros((3, runner.requests.blocks.shape[1]), np.int32), starts=zeros,
        counts=zeros, sampled=("a",), rows=zeros,
    )  # fmt: skip
    before = dict(runner.programs.stages.traces)
    with pytest.raises(RetraceError, match="not compiled for 3 x 16 tokens, only for 4 x 16"):
        runner.forward(piece)
    assert runner.programs.stages.traces == before


def test_the_trace_count_is_the_bucket_count(worker):
    runner = worker.get_model_runner()
    stages, buckets = runner.programs.stages, runner.buckets
    assert (buckets.rows, buckets.tokens) == ((1, 4), (16, 64))
    shapes, rows = len(buckets.shapes), len(buckets.rows)
    backbone = ("embed", "layers1", "select")
    sampling = ("logits", "greedy", "draw", "edit", "penalise", "gather", "scores")
    assert stages.traces == {
        **dict.fromkeys(backbone, shapes), **dict.fromkeys(sampling, rows), "zero1": 1, "copy1": 1
    }  # fmt: skip


@pytest.mark.parametrize("group", [2, 5])
def test_layers_are_compiled_in_programs_of_any_number(make_worker, drive, dense, group):
    worker = make_worker(settings={"layers_per_program": group})
    groups = worker.get_model_runner().programs.groups
    assert [start for start, _ in groups] == list(range(0, 2, min(group, 2)))
    driver = drive(worker)
    driver.add("a", range(20))
    assert driver.run(4) == {"a": dense(worker).greedy(range(20), 4)}


def test_a_second_start_compiles_nothing(make_worker, tmp_path):
    folder = tmp_path / "programs"
    settings = {"compilation_cache": str(folder), **FEW}
    first = make_worker(settings=settings).program_report()
    assert (first.asked, first.cached) == (sum(first.shapes.values()), 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    second = make_worker(settings=settings).program_report()
    assert second.asked == second.cached == first.asked
    assert second.traces == first.traces


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        with counted_compilations(cache_folder("none")) as counts:
            jax.jit(lambda x: x + 5).lower(np.ones(5, np.float32)).compile()
        assert (counts.asked, counts.cached) == (1, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda held: b"noise", lambda held: held[: len(held) // 2]])
def test_a_damaged_program_is_compiled_again(tmp_path, damage):
    folder = tmp_path / "programs"

    def compiled() -> Compilations:
        with counted_compilations(folder) as counts:
            done = jax.jit(lambda x: x * 3 + 6).lower(np.ones(5, np.float32)).compile()
        assert np.asarray(done(np.ones(5, np.float32))).tolist() == [9] * 5
        return counts

    assert (compiled().cached, compiled().cached) == (0, 1)
    (kept,) = folder.glob("*-cache")
    kept.write_bytes(damage(kept.read_bytes()))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        counts = compiled()
    assert (counts.asked, counts.cached) == (1, 0)


def test_compiling_leaves_the_settings_of_the_process_as_they_were(tmp_path):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_enable_compilation_cache",
    )
    before = [getattr(jax.config, name) for name in names]
    with counted_compilations(tmp_path / "a") as counts:
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "a")
        jax.jit(lambda x: x + 3).lower(np.ones(5, np.float32)).compile()
    assert [getattr(jax.config, name) for name in names] == before
    jax.jit(lambda x: x + 4).lower(np.ones(5, np.float32)).compile()
    assert (counts.asked, counts.compiled) == (1, 1)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    words = r"plugins.tpu.compilation_cache = .*open.*: others may write to it"
    with pytest.raises(ConfigError, match=words), counted_compilations(folder):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be made"),
        counted_compilations(tmp_path / "file"),
    ):
        pass


def test_the_folder_is_the_users_own(tmp_path):
    assert cache_folder("none") is None
    assert str(cache_folder("/x/y")) == "/x/y"
    assert str(cache_folder("auto", {"XDG_CACHE_HOME": "/c"})) == "/c/hardpoint/xla"
    assert str(cache_folder("auto", {"HOME": "/h"})) == "/h/.cache/hardpoint/xla"


def test_compiling_ends_when_it_is_given_up(make_worker):
    given_up = []
    some = {"request_buckets": (4,), "token_buckets": (64,)}
    worker = make_worker(cancelled=lambda: bool(given_up), settings=some)
    runner = worker.get_model_runner()
    given_up.append(True)
    with pytest.raises(CancelledStepError, match="compiling was ended"):
        runner.warm_up()
