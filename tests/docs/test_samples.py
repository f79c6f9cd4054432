"""The plugins that the pages show work as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "out_of_tree"
FLAGS = re.MULTILINE | re.DOTALL
DUMMY = ("--platform", "dummy", "--load-format", "dummy")
WORK = """
import threading
from hardpoint.errors import RemoteError
from hardpoint_engine import LLM, SamplingParams

def rank(worker):
    return worker.rank, threading.current_thread().name

def answers(executor, **dummy):
    keys = {"platform": "dummy", "load_format": "dummy", "plugins": {"dummy": dummy}}
    with LLM(executor=executor, **keys) as llm:
        print(llm.executor.check_health(5)[-1].rank, llm.collective_rpc(rank))
        try:
            llm.collective_rpc(lambda worker: 1 / 0)
        except RemoteError as error:
            print(type(error.__cause__).__name__)
        sampling = SamplingParams(temperature=0, max_tokens=20)
        return [result.outputs[0].token_ids for result in llm.generate(["one", "two"], sampling)]

if __name__ == "__main__":
    assert answers("threads") == answers("uni")
    answers("hardpoint_threads.executor:ThreadsExecutor", num_workers=2)
    try:
        answers("threads", num_workers=2, fail_at="load")
    except RemoteError as error:
        print("failed to load")
    print([thread.name for thread in threading.enumerate() if "threads-" in thread.name])
"""


def test_the_executor_works(sample):
    threads = sample("writing-an-executor.md")
    package = EXAMPLES / "hardpoint-threads" / "src" / "hardpoint_threads"
    for shown in (threads.folder / "hardpoint_threads").glob("*.py"):
        assert shown.read_text() == (package / shown.name).read_text()
    lines = threads.run("-c", WORK).stdout.splitlines()
    assert lines[0] == "0 [(0, 'threads-0')]"
    assert lines[1] == "ZeroDivisionError"
    assert "1 [(0, 'threads-0'), (1, 'threads-1')]" in lines
    assert lines[-2:] == ["failed to load", "[]"]


def test_the_extension_changes_adds_and_judges(sample):
    house = sample("writing-an-extension.md")
    report = json.loads(house.run("doctor", *DUMMY, "--admission", "short", "--json").stdout)
    assert report["selected"]["error"] is None
    found = {row["key"]: (row["value"], row["origin"]) for row in report["settings"]}
    assert found["max_num_seqs"] == (4, "plugin house: the house is small")
    refused = house.run(
        "generate", *DUMMY, "--raw", "--max-tokens", "1", "--admission", "short", "x" * 1001, code=2
    )
    assert "no prompts of more than 1000 tokens in this house" in refused.stderr
    told = house.run(
        "generate", *DUMMY, "--raw", "--max-tokens", "1", "--log-level", "info", "one"
    )  # fmt: skip
    assert "max_num_seqs: None -> 4, plugin house: the house is small" in told.stderr
    script = (
        "from hardpoint_engine import LLM\n"
        "with LLM(platform='dummy', load_format='dummy') as llm: print(llm.collective_rpc('where'))"
    )
    assert house.run("-c", script).stdout == "['rank 0 on dummy']\n"


def test_the_policy_of_graphs_rounds_to_threes(sample):
    house = sample("writing-an-extension.md")
    arguments = ("generate", "--platform", "cpu", "--load-format", "dummy", "--raw", "--json")
    arguments += ("--num-kv-blocks", "64", "--max-tokens", "6", "one", "two")
    eager = json.loads(house.run(*arguments).stdout)["results"]
    graphs = ("--graph-mode", "full", "--graph-stats", "--max-num-seqs", "4")
    plain = house.run(*arguments, *graphs)
    policed = house.run(*arguments, *graphs, "--graph-policy", "threes")
    for done, multiple in ((plain, 1), (policed, 3)):
        results = json.loads(done.stdout)["results"]
        assert [each["token_ids"] for each in results] == [each["token_ids"] for each in eager]
        rows = re.findall(r"^FULL +\d+ +(\d+) ", done.stderr, re.MULTILINE)
        assert rows
        assert all(int(padded) % multiple == 0 for padded in rows)
    assert "2 " in re.search(r"^FULL +2 +(\d+ )", plain.stderr, re.MULTILINE)[1]
    unknown = house.run(*arguments, "--graph-policy", "thirds", code=2)
    assert "graph_policy" in unknown.stderr
    assert "Did you mean threes?" in unknown.stderr


def test_waiting_prompts_run_in_the_end(sample):
    house = sample("writing-an-extension.md")
    long = ("x" * 101, "y" * 101)
    done = house.run(
        "generate", *DUMMY, "--raw", "--json", "--max-tokens", "2", "--admission", "short", *long
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    assert [len(result["token_ids"]) for result in results] == [2, 2]


CALM = """
from hardpoint.errors import InvalidRequestError
from hardpoint_engine import LLM, SamplingParams

keys = {"platform": "cpu", "load_format": "dummy", "num_kv_blocks": 64, "seed": 1}
with LLM(**keys) as llm:
    def ids(**more):
        sampling = SamplingParams(max_tokens=64, ignore_eos=True, **more)
        results = llm.generate(["one", "two", "three"], sampling)
        return [result.outputs[0].token_ids for result in results]

    drawn = ids(temperature=2.0, seed=1)
    assert all(13 not in answer for answer in drawn)
    calm = ids(temperature=1.0, seed=1, extra_args={"calm": 0.001})
    assert calm == ids(temperature=0) != drawn
    try:
        ids(extra_args={"calm": -1.0})
    except InvalidRequestError as error:
        print(error)
"""


def test_a_processor_reads_its_column(sample):
    house = sample("writing-an-extension.md")
    assert house.run("-c", CALM).stdout.splitlines()[-1].endswith("calm must be above 0")


TORCH_ACME = """
import simulated_device
simulated_device.install()
"""


def test_the_platform_generates_what_the_host_does(sample):
    acme = sample("writing-a-platform.md")
    missing = acme.run("doctor", "acme", code=1)
    assert "the package torch_acme is not installed" in missing.stdout
    example = ROOT / "examples" / "out_of_tree" / "hardpoint-acme" / "src" / "hardpoint_acme"
    shutil.copy(example / "torch_backend.py", acme.folder / "simulated_device.py")
    (acme.folder / "torch_acme.py").write_text(TORCH_ACME)
    report = acme.run("doctor", "acme").stdout
    assert "one unit" in report
    assert "plugins.acme.unit" in report
    wrong = acme.run("doctor", "--set", "plugins.acme.unit=-1", "--platform", "acme", code=2)
    assert "plugins.acme.unit = -1" in wrong.stderr + wrong.stdout
    arguments = ("--load-format", "dummy", "--raw", "--json", "--max-tokens", "6")
    arguments += ("--num-kv-blocks", "64", "one")
    chosen = json.loads(acme.run("generate", *arguments).stdout)
    assert chosen["platform"] == "acme"
    host = json.loads(acme.run("generate", "--platform", "cpu", *arguments).stdout)
    (ours,), (theirs,) = chosen["results"], host["results"]
    assert ours["token_ids"] == theirs["token_ids"]
    refused = acme.run("generate", *arguments, "--prompt-logprobs", "1", code=2)
    assert "platform 'acme' does not support prompt logprobs" in refused.stderr


PROBED = """
from hardpoint_conformance.probe import find_probe
print(type(find_probe("acme")).__name__, find_probe("acme").held_bytes(None))
"""


def test_the_probe_of_the_page_on_certifying_is_found_and_counts(sample):
    """With the page's own entry point, in the distribution of the page on platforms."""
    acme = sample("writing-a-platform.md")
    text = (ROOT / "docs" / "certifying.md").read_text()
    for name, content in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", text, FLAGS):
        if name == "hardpoint_acme/probe.py":
            (acme.folder / name).write_text(content)
        elif name == "pyproject.toml":
            groups = tomllib.loads(content)["project"]["entry-points"]
    ((group, probes),) = groups.items()
    (info,) = acme.folder.glob("*.dist-info")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in probes.items()))
    (acme.folder / "torch_acme.py").write_text("def memory_allocated(): return 7\n")
    assert acme.run("-c", PROBED).stdout == "AcmeProbe 7\n"


def test_the_kits_own_readme_shows_what_the_page_on_certifying_shows():
    shown = [
        re.search(r"^from hardpoint_conformance import ModelRunnerSuite.*?^```", text, FLAGS)[0]
        for text in (
            (ROOT / "conformance" / "README.md").read_text(),
            (ROOT / "docs" / "certifying.md").read_text(),
        )
    ]
    assert shown[0] == shown[1]
    assert shown[0].count(".of(") == 4
