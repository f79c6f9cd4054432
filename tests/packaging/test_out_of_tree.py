"""The plugins of third parties in ``examples/out_of_tree``, from their wheels beside ours."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "out_of_tree"
REPORT = Path(__file__).with_name("acme_report.py")
OWN = "hardpoint_acme"


@pytest.fixture(scope="module")
def environment(shared_environment):
    shared_environment.install(
        "hardpoint-acme[conformance]", "hardpoint-threads", "hardpoint-cpu", "hardpoint-multiproc"
    )
    return shared_environment


@pytest.fixture(scope="module")
def report(environment):
    """What one process of that environment said."""
    done = environment.run(REPORT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def certificate(environment, *arguments):
    done = environment.hardpoint("conformance", *arguments, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, (document["reasons"], failures(document))
    assert document["conformant"]
    return document


def failures(document):
    return [each for each in document["results"] if each["outcome"] in ("failed", "not run")]


def test_the_tokens_are_those_of_the_host(report):
    assert report["acme"] == report["cpu"]
    assert report["sharded"] == report["cpu"]


def test_every_collaborator_is_replaced(report):
    assert {name.rpartition(".")[2] for name in report["made"]} == {
        "make_columns", "make_communicator", "make_device", "make_forward_context",
        "make_graph_plan", "make_graphs", "make_kv_cache", "make_metadata_builders", "make_model",
        "make_model_runner", "make_operations", "make_quantization", "make_requests",
        "make_sampler", "make_timing",
    }  # fmt: skip
    assert {module.split(".")[0] for module in report["made"].values()} == {OWN}
    parts = {name: kind for name, kind in report["parts"].items() if name not in ("plan", "model")}
    assert len(parts) == 9
    assert all(kind.startswith(OWN) for kind in parts.values()), parts
    assert report["communicators"] == [f"{OWN}.device.UnitCommunicator"] * 2


def test_the_norm_is_its_own(report):
    assert report["operations"] == [1, [f"{OWN}.operations:rms_norm"]]


def test_weights_are_kept_as_bytes_where_the_key_says_so(report):
    types, reference = report["types"]
    assert reference == f"{OWN}.quantization:ByteRows"
    assert types["torch.uint8"] >= 4
    assert [len(ids) for ids in report["packed"]] == [6, 6]


def test_records_of_its_own_go_there_and_back(report):
    assert report["extra"] == [{"banked": 5}, 1]


def test_the_executor_gives_what_uni_gives(report):
    assert report["threads"] == report["uni"]
    source = EXAMPLES / "hardpoint-threads" / "src" / "hardpoint_threads" / "executor.py"
    assert len(source.read_text().splitlines()) < 100


def test_nothing_of_torch_or_hardpoint_is_changed(report):
    """But for what torch sets where a backend registers itself. The counter-proof is below."""
    assert report["patches"] == ["torch.acme"]
    assert report["early"] == []


def test_a_patch_would_be_seen():
    import hardpoint.records
    import hardpoint.sleep

    spec = importlib.util.spec_from_file_location(REPORT.stem, REPORT)
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    attributes, patches = report.attributes, report.patches

    before = attributes()
    method, function = hardpoint.sleep.SleepState.woke, hardpoint.records.shown
    hardpoint.sleep.SleepState.woke = lambda self, tags: None
    hardpoint.records.shown = repr
    hardpoint.records.more = len
    try:
        seen = patches(before, attributes())
    finally:
        hardpoint.sleep.SleepState.woke, hardpoint.records.shown = method, function
        del hardpoint.records.more
    assert seen == [
        "hardpoint.records.more", "hardpoint.records.shown", "hardpoint.sleep.SleepState.woke"
    ]  # fmt: skip
    assert patches(before, attributes()) == []


def test_admission_is_its_own(environment):
    arguments = ("generate", "--platform", "acme", "--load-format", "dummy", "--raw")
    arguments += ("--num-kv-blocks", "100", "--max-tokens", "1", "--admission", "acme-banks")
    done = environment.hardpoint(*arguments, "x" * 1100)
    assert done.returncode == 2
    assert "a bank holds prompts of at most 1024 tokens" in done.stderr


def test_its_own_settings_are_checked(environment):
    arguments = ("generate", "--platform", "acme", "--load-format", "dummy", "--raw", "x")
    done = environment.hardpoint(*arguments, "--set", "plugins.acme.memory_bytes=7")
    assert done.returncode == 2
    assert "plugins.acme.memory_bytes = 7" in done.stderr
    done = environment.hardpoint(*arguments, "--quantization", "acme3")
    assert done.returncode == 2
    assert "Did you mean acme8?" in done.stderr


@pytest.mark.parametrize("package", ["hardpoint_acme", "hardpoint_threads"])
def test_no_private_module_is_imported(package):
    folder = EXAMPLES / package.replace("_", "-")
    sources = sorted(folder.glob("**/*.py"))
    assert len(sources) >= 3
    for source in sources:
        for name in imported(ast.parse(source.read_text())):
            hidden = [part for part in name.split(".") if part.startswith("_")]
            inner = name.startswith("torch.") or hidden == ["__future__"]
            assert not hidden or inner, f"{source} imports {name}"


def imported(tree):
    """Every module and name that a file imports, with what it is of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_executor_is_certified(environment):
    assert certificate(environment, "threads")["kind"] == "executor"


@pytest.mark.parametrize("executor", ["uni", pytest.param("mp", marks=pytest.mark.slow)])
def test_the_platform_is_certified(environment, executor):
    document = certificate(environment, "acme", "--executor", executor)
    assert document["executors"] == [executor]
    assert document["version"] == "1.4.0"
    assert document["probe"] == "hardpoint_acme.probe:AcmeProbe"
    verdicts = {line["name"]: line["verdict"] for line in document["capabilities"]}
    assert verdicts["prefix caching"] == "pass"
    assert verdicts["LoRA adapters"] == "xfail"
    assert verdicts["multimodal input"] == "never"


def test_the_author_has_one_line_for_each_contract(environment):
    """Its own tests, as the author runs them on mp; those whose workers are shared."""
    tests = EXAMPLES / "hardpoint-acme" / "tests" / "test_conformance.py"
    lines = [line for line in tests.read_text().splitlines() if line.startswith("Test")]
    assert len(lines) == 4
    selected = ("--hardpoint-executor", "mp", "-m", "not hardpoint_own_workers")
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *selected)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
