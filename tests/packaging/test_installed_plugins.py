"""What befalls plugins that are really installed: by wheels, in an environment without this
repository; loaded again and again, of the wrong shape, built for other numbers, left over.
"""

from __future__ import annotations

import json
import shutil

import pytest

HEAD = """
from hardpoint.hookspecs import hookimpl
from hardpoint.records import ExtensionRecord, Offer, PlatformRecord
"""
EXTENSION = HEAD + "@hookimpl\ndef hardpoint_extension():\n    return ExtensionRecord({})\n"

MARKER = (
    EXTENSION.format("name='marker', api=(2, 0)")
    + """
import os, sys
marks = vars(sys).setdefault("_marks", [])
marks.append("imported")

@hookimpl
def hardpoint_worker_started(worker):
    marks.append(f"started {worker.rank}")

def told(worker):
    return os.getpid(), list(marks)

@hookimpl
def hardpoint_worker_methods():
    return {"marks": told}
"""
)

SECOND = (
    HEAD
    + """
@hookimpl
def hardpoint_platform():
    return PlatformRecord(
        name="second", api=(2, 0), platform="second_unit.platform:Second",
        settings="hardpoint_dummy.settings:DummySettings",
    )
"""
)
SECOND_PLATFORM = """
from hardpoint_dummy.platform import DummyPlatform
class Second(DummyPlatform):
    name = "second"
"""

SHAPES = EXTENSION.format("name='whole', api=(2, 0)") + (
    """
class Kind:
    @hookimpl
    def hardpoint_extension(self):
        return ExtensionRecord(name="instance", api=(2, 0))

instance = Kind()
number = 7
"""
)
WRONG_SHAPES = {
    "kind": ("shapes.plugin:Kind", "leads to a class", "or an instance"),
    "function": ("shapes.plugin:hardpoint_extension", "is a function", "'shapes.plugin'"),
    "value": ("shapes.plugin:number", "an object of int"),
    "attribute": ("shapes.plugin:nothing", "no attribute 'nothing'"),
    "module": ("shapes.nothing", "No module named 'shapes.nothing'"),
    "package": ("no_such_package", "No module named 'no_such_package'"),
    "empty": ("shapes", "must be implemented in 'shapes'"),
    "other": ("shapes.plugin", "'whole'", "'other'"),
    "malformed": ("shapes.plugin:", "the record is named 'whole'"),
    "twice": ("shapes.plugin:instance.nothing.more", "no attribute 'nothing'"),
}

FLAKY = "import umbra_driver\n" + EXTENSION.format("name='flaky', api=(2, 0)")

RAMP = (
    EXTENSION.format("name='ramps', api=(2, 0)")
    + """
@hookimpl
def hardpoint_weight_loaders():
    return [Offer(name="dummy", reference="ramps.loader:Ramps")]
"""
)
RAMP_LOADER = """
import math
import numpy as np
from hardpoint.checkpoints.decoder_tensors import expected_shapes
from hardpoint.checkpoints.weight_source import WeightSource

class Ramps(WeightSource):
    def __init__(self, description):
        self.shapes = expected_shapes(description)

    def read(self, name):
        shape = self.shapes[name]
        numbers = np.arange(math.prod(shape), dtype=np.float32)
        return (numbers / numbers.size).reshape(shape)

    def close(self):
        pass
"""


SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip


def numbered(name, api, hooks=""):
    """Files of an extension built for a contract number."""
    return {"plugin.py": EXTENSION.format(f"name={name!r}, api={api}") + hooks}


FEWER = "@hookimpl\ndef hardpoint_configure():\n    return []\n"
UNKNOWN = "@hookimpl\ndef hardpoint_step_finished(scheduler_output, moon):\n    pass\n"


@pytest.fixture(scope="module")
def environment(shared_environment, tmp_path_factory, wheel_of):
    """All of them, installed by one call of pip."""
    folder = tmp_path_factory.mktemp("wheels")

    def extension(name, files, **more):
        module = {"extension": {name: f"{name}.plugin"}}
        return wheel_of(folder, name, **{"entry_points": module, "files": files} | more)

    shapes = {name: value for name, (value, *_) in WRONG_SHAPES.items()}
    shapes |= {"whole": "shapes.plugin", "instance": "shapes.plugin:instance"}
    wheels = [
        extension("marker", {"plugin.py": MARKER}),
        extension("shapes", {"plugin.py": SHAPES}, entry_points={"extension": shapes}),
        extension("flaky", {"plugin.py": FLAKY}),
        extension("ramps", {"plugin.py": RAMP, "loader.py": RAMP_LOADER}),
        extension("before", numbered("before", (1, 4), FEWER)),
        extension("now", numbered("now", (2, 0), FEWER)),
        extension("after", numbered("after", (3, 0), FEWER)),
        extension("moonstruck", numbered("moonstruck", (2, 0), UNKNOWN)),
        wheel_of(
            folder,
            "second-unit",
            entry_points={
                "platform": {"second": "second_unit.plugin"},
                "extension": {"second-extras": "second_unit.extras"},
            },
            files={
                "plugin.py": SECOND,
                "platform.py": SECOND_PLATFORM,
                "extras.py": "import no_such_library\n",
            },
        ),
    ]
    ours = ("hardpoint-engine", "hardpoint-dummy", "hardpoint-multiproc", "hardpoint-cpu")
    shared_environment.install(*ours, *wheels)
    return shared_environment


def without(*kept):
    """Return the variable that keeps all of the plugins here out but some."""
    names = {"marker", "flaky", "ramps", "before", "now", "after", "moonstruck", "second-extras"}
    names |= set(WRONG_SHAPES) | {"whole", "instance", "second"}
    return {"HARDPOINT_DISABLE": ",".join(sorted(names - set(kept)))}


def listed(environment, *arguments, **variables):
    done = environment.hardpoint("plugins", "--json", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["plugins"]}


def test_entry_points_of_each_shape_are_told_apart(environment):
    rows = listed(environment)
    assert rows["whole"]["state"] == rows["instance"]["state"] == "loaded"
    for name, (_, *words) in WRONG_SHAPES.items():
        assert rows[name]["state"] == "failed", rows[name]
        assert all(word in rows[name]["reason"] for word in words), rows[name]
    assert rows["marker"]["state"] == "loaded"


def test_each_number_is_served_or_refused(environment):
    rows = listed(environment)
    assert rows["before"]["state"] == rows["now"]["state"] == "loaded"
    assert rows["after"]["state"] == "refused"
    reason = rows["after"]["reason"]
    assert "plugin API 3.0, core API 2.0" in reason
    assert reason.endswith("Install a newer hardpoint, or a after built for API 2")
    assert rows["moonstruck"]["state"] == "failed"
    assert "no argument 'moon'" in rows["moonstruck"]["reason"]


def test_plugins_of_the_number_before_run_unchanged(environment):
    done = environment.hardpoint(
        "generate", "--platform", "dummy", "--load-format", "dummy", "--raw", "--max-tokens", "2",
        "--log-level", "info", "one", **without("before", "now"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "set aside" not in done.stderr


def test_a_part_that_fails_leaves_the_rest_of_its_distribution(environment):
    done = environment.hardpoint("doctor", "second", "--json", **without("second", "second-extras"))
    assert json.loads(done.stdout)["platforms"][0]["available"]
    run = environment.hardpoint(
        "generate", "--platform", "second", "--load-format", "dummy", "--raw", "--max-tokens", "2",
        "one", **without("second", "second-extras"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("second-extras") >= 1
    assert run.stderr.count("is set aside") == 1
    assert "no_such_library" in run.stderr


ONCE = """
import sys
from hardpoint_engine import LLM

def answers(executor, **settings):
    plugins = {"dummy": {"num_workers": 2 if executor == "mp" else 1}, **settings}
    with LLM(platform="dummy", load_format="dummy", executor=executor, plugins=plugins) as llm:
        return llm.collective_rpc("marks")

if __name__ == "__main__":
    print(answers("uni"))
    print(answers("uni"))
    for start in ("nursery", "plain"):
        print(answers("mp", mp={"start": start}))
    print(sys._marks)
"""


def test_a_plugin_is_registered_once_in_each_process(environment, tmp_path):
    script = tmp_path / "once.py"
    script.write_text(ONCE)
    done = environment.run(script, **without("marker"))
    assert done.returncode == 0, done.stderr
    first, second, nursery, plain, driver = map(eval, done.stdout.splitlines())
    assert first[0][1] == ["imported", "started 0"]
    assert second[0][1] == driver == ["imported", "started 0", "started 0"]  # two engines
    for answers in (nursery, plain):
        assert len({pid for pid, _ in answers}) == 2
        assert [marks for _, marks in answers] == [["imported", f"started {r}"] for r in (0, 1)]


TWICE = """
from hardpoint_engine import LLM, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens=5)

def tokens(llm, prompt):
    return list(llm.generate([prompt], greedy)[0].outputs[0].token_ids)

def started(name, **settings):
    return LLM(platform=name, load_format="dummy", executor="uni", plugins={name: settings})

with started("dummy") as alone:
    expected = [tokens(alone, [n, 2, 3]) for n in range(4)]
with started("dummy", memory_bytes=1 << 24) as one, started("second", memory_bytes=1 << 25) as two:
    assert [llm.executor.platform.name for llm in (one, two)] == ["dummy", "second"]
    assert [llm.executor.platform.settings.memory_bytes >> 24 for llm in (one, two)] == [1, 2]
    for number in range(4):
        for llm in (one, two, one):
            assert tokens(llm, [number, 2, 3]) == expected[number]
    one.shutdown()
    assert tokens(two, [0, 2, 3]) == expected[0]
print("both")
"""


def test_two_platforms_live_in_one_process(environment):
    assert environment.code(TWICE, **without("second")) == "both\n"


AGAIN = """
import importlib, subprocess, sys
from hardpoint.config import Config
from hardpoint.errors import PluginLoadError
from hardpoint.registry import Registry

def attempt(registry):
    try:
        return registry.load("extension", "flaky")
    except PluginLoadError as error:
        return error

first = Registry.discover(Config())
errors = [attempt(first) for _ in range(3)]
print(len({id(error.__cause__) for error in errors}), errors[0])
print(type(attempt(Registry.discover(Config())).__cause__).__name__)
subprocess.run(sys.argv[1:], check=True)
print(attempt(first).__cause__ is errors[0].__cause__)
later = Registry.discover(Config())
loaded = attempt(later)
print(loaded.state, loaded.record.name)
for _ in range(30):
    registry = Registry.discover(Config())
    assert registry.use("extension", "flaky").module is loaded.module
    assert registry.use("extension", "flaky").module is loaded.module
    assert registry.used("extension") == (registry.load("extension", "flaky"),)
importlib.reload(loaded.module)
assert attempt(Registry.discover(Config())).state == "loaded"
print("again and again")
"""


def test_a_failed_load_is_retried_by_the_next_registry(environment, tmp_path, wheel_of):
    """The same error each time from the registry that met it; once what was missing is installed,
    a new registry of the same process loads it.
    """
    driver = wheel_of(tmp_path, "umbra-driver", entry_points={}, files={}, requires="hardpoint")
    command = environment.installing(driver)
    out = environment.code(AGAIN, *command, **without("flaky")).splitlines()
    assert out[0].startswith("1 extension 'flaky' of flaky 1.0")
    assert "No module named 'umbra_driver'" in out[0]
    assert out[1:] == ["ModuleNotFoundError", "True", "loaded flaky", "again and again"]


def test_shards_of_a_foreign_loader_make_the_whole(environment, tmp_path):
    script = tmp_path / "shards.py"
    script.write_text(
        """
import sys
import numpy as np
from hardpoint.config.loading import load_config
from hardpoint_engine.build import start_engine

def parts(worker):
    slots = worker.get_model().weight_slots()
    found = {name: slots[name] for name in slots if "layers.0" in name or "embed" in name}
    return {
        name: (slot.shape, [(s.start, s.stop) for s in slot.held], slot.view().numpy().copy())
        for name, slot in found.items() if not slot.runs
    }

if __name__ == "__main__":
    keys = {"model": sys.argv[1], "load_format": "dummy", "platform": "cpu", "num_kv_blocks": 16}
    keys |= {"executor": "mp", "tensor_parallel_size": 2}
    with start_engine(load_config(overrides=keys)) as core:
        shards = core.executor.collective_rpc(parts)
    split = 0
    for name, (shape, *_) in shards[0].items():
        ramp = (np.arange(np.prod(shape), dtype=np.float32) / np.float32(np.prod(shape)))
        ramp = ramp.reshape(shape)
        for _, held, part in (shard[name] for shard in shards):
            mine = tuple(slice(start, stop) for start, stop in held)
            assert np.array_equal(part, ramp[mine]), name
        held = [shard[name][1] for shard in shards]
        if held[0] != held[1]:
            axis = next(i for i in range(len(shape)) if held[0][i] != held[1][i])
            whole = np.concatenate([shard[name][2] for shard in shards], axis)
            assert np.array_equal(whole, ramp), name
            split += 1
    print(split)
"""
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL))
    done = environment.run(script, model, **without("ramps"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5


# What is left over on the disk.


def test_what_is_found_twice_is_one(environment, tmp_path):
    """The same folder doubled on ``sys.path``, a link to it, a copy of the metadata elsewhere."""
    copied = tmp_path / "copied"
    shutil.copytree(environment.site / "marker-1.0.dist-info", copied / "marker-1.0.dist-info")
    linked = tmp_path / "linked"
    linked.symlink_to(environment.site)
    code = """
        import sys
        sys.path += sys.argv[1:]
        from hardpoint.config import Config
        from hardpoint.registry import Registry
        registry = Registry.discover(Config())
        found = [plugin for plugin in registry.plugins if plugin.name == "marker"]
        print(len(found), registry.load("extension", "marker").state)
        """
    paths = (str(copied), str(linked), str(environment.site))
    assert environment.code(code, *paths, **without("marker")) == "1 loaded\n"


@pytest.mark.parametrize("left", ["~arker-1.0.dist-info", "marker-0.9.dist-info"])
def test_what_an_interrupted_upgrade_leaves_is_no_second_plugin(environment, left):
    """pip renames with a tilde what it is about to remove."""
    folder = environment.site / left
    shutil.copytree(environment.site / "marker-1.0.dist-info", folder)
    old = (folder / "METADATA").read_text().replace("Version: 1.0", "Version: 0.9")
    (folder / "METADATA").write_text(old)
    (folder / "entry_points.txt").write_text("[hardpoint.extensions]\nmarker = marker.old\n")
    code = """
        from importlib import metadata
        from hardpoint.metadata import find
        (found,) = [plugin for plugin in find() if plugin.name == "marker"]
        print(found.version == metadata.version("marker"), found.entry_point)
        """
    try:
        same, module = environment.code(code).split()
    finally:
        shutil.rmtree(folder)
    assert same == "True"
    if left.startswith("~"):
        assert module == "marker.plugin"


def test_a_listing_among_300_distributions_imports_none_and_writes_nothing(environment, tmp_path):
    """Without a home to write to; in 150 ms of a processor."""
    crowd = tmp_path / "crowd"
    for number in range(300):
        info = crowd / f"crowd{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: crowd{number}\nVersion: 1\n")
        plugins = f"[hardpoint.extensions]\ncrowd{number} = crowd{number}.plugin\n"
        (info / "entry_points.txt").write_text(plugins if number % 3 == 0 else "[other]\na = b\n")
    before = sorted(map(str, crowd.rglob("*")))
    code = """
        import os, subprocess, sys, time
        sys.path.append(sys.argv[1])
        opened = []
        def audit(event, arguments):
            if event == "open" and isinstance(arguments[2], int):
                if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    opened.append(arguments[0])
        from hardpoint import metadata
        sys.addaudithook(audit)
        before = set(sys.modules)
        names = [plugin.name for plugin in metadata.find()]
        assert not {name for name in set(sys.modules) - before if "importlib" not in name}
        assert opened == [], opened
        def seconds():
            begun = time.process_time()
            metadata.find()
            return time.process_time() - begun
        fastest = min(seconds() for _ in range(5))
        assert fastest < 0.15, fastest
        print(len([name for name in names if name.startswith("crowd")]))
        """
    out = environment.code(code, str(crowd), HOME="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere")
    assert out == "100\n"
    assert sorted(map(str, crowd.rglob("*"))) == before


def test_our_wheels_have_what_they_ask_for_in_versions_that_go_together(environment):
    code = """
        from importlib import metadata
        from packaging.requirements import Requirement
        asked = 0
        for each in metadata.distributions():
            if each.metadata["Name"].startswith("hardpoint"):
                for line in each.requires or ():
                    wanted = Requirement(line)
                    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                        assert wanted.specifier.contains(metadata.version(wanted.name)), line
                        asked += 1
        print(asked)
        """
    assert int(environment.code(code)) > 10
