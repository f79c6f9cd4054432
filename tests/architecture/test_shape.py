"""Words, sizes and names: what keeps the house small, neutral and deliberate."""

from __future__ import annotations

import ast
import importlib
import re
import statistics
import subprocess
from pathlib import Path

VENDOR_WORDS = {
    "cuda", "rocm", "xpu", "tpu", "nvidia", "amd", "intel", "hip", "ascend", "habana", "gaudi",
    "nvml", "nccl", "rccl", "xccl", "metal", "mps", "npu",
}  # fmt: skip
NEUTRAL = ("core", "engine", "runtime", "conformance")
CEILING = {"core": 400}
CEILING_ELSEWHERE = 500
FUNCTION_CEILING = 80
PUBLIC_NAMES = Path(__file__).with_name("public_names.txt")


def words(text: str) -> set[str]:
    """Whole words, with identifiers split at underscores and humps."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return {part.lower() for part in parts}


def test_the_word_splitter_sees_vendor_words():
    assert {"cuda", "tpu", "hip"} <= words("is_cuda_ready TpuWorker HIP")
    assert not words("membership chip") & VENDOR_WORDS


def test_the_neutral_part_names_no_vendor(root):
    for top in NEUTRAL:
        for path in (root / top).glob("src/**/*.py"):
            found = words(path.read_text()) & VENDOR_WORDS
            assert not found, f"{path.relative_to(root)} names {sorted(found)}"


def test_no_platform_or_executor_is_compared_by_name_in_the_neutral_part(root):
    names = {"cpu", "dummy", "cuda", "rocm", "xpu", "tpu"}
    names |= {"uni", "mp", "ray", "ray_legacy", "external_launcher"}
    for top in ("core", "engine"):
        for path in (root / top).glob("src/**/*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    constants = {
                        leaf.value
                        for side in (node.left, *node.comparators)
                        for leaf in ast.walk(side)
                        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
                    }
                    ours = constants & names
                    if ours == {"dummy"} and "load_format" in ast.unparse(node):
                        continue  # a weight format of that name, not the platform
                    assert not ours, f"{path.relative_to(root)}:{node.lineno} compares with {ours}"


def test_files_and_functions_stay_small(root, sources):
    sizes = {path: len(path.read_text().splitlines()) for path in sources}
    print(f"\n{len(sizes)} files, median {statistics.median(sizes.values())} lines")
    for path, lines in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"  {lines:4} {path.relative_to(root)}")
    for path, lines in sizes.items():
        top = path.relative_to(root).parts[0]
        assert lines <= CEILING.get(top, CEILING_ELSEWHERE), f"{path} has {lines} lines"
    lengths = [
        (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            f"{path.relative_to(root)}:{node.name}",
        )
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = sorted((each for each in lengths if each[0] > 50), reverse=True)
    print(f"{len(lengths)} functions, {len(long)} of them longer than 50 lines")
    for lines, name in long:
        print(f"  {lines:4} {name}")
        assert lines <= FUNCTION_CEILING, f"{name} has {lines} lines"


PICKLERS = {
    "pickle", "_pickle", "cloudpickle", "pickletools", "copyreg", "dill", "marshal", "shelve",
    "joblib",
}  # fmt: skip
UNPICKLING = {"recv_pyobj", "send_pyobj", "ForkingPickler"}


def picklers_named(source: str) -> list[str]:
    """Return what names a pickler, or a loader that would use one.

    A configuration key may be called ``pickle``: as a field of a class, or read as ``rpc.pickle``,
    of which nothing is read in turn. That is no pickler.
    """
    tree = ast.parse(source)
    fields = {
        node.target
        for each in ast.walk(tree) if isinstance(each, ast.ClassDef)
        for node in each.body if isinstance(node, ast.AnnAssign)
    }  # fmt: skip
    bases = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = []
    for node in ast.walk(tree):
        words = set()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            words = {word for name in [*names, module] for word in name.split(".")}
        elif isinstance(node, ast.Name) and node not in fields:
            words = {node.id}
        elif isinstance(node, ast.Attribute):
            key = re.search(r"(^|\.)rpc\.pickle$", ast.unparse(node)) and node not in bases
            words = set() if key else {node.attr}
            if ast.unparse(node) == "torch.load":
                found.append("torch.load")
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            texts = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
            words = {word for text in texts if isinstance(text, str) for word in text.split(".")}
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append(node.arg)
        found += sorted(words & (PICKLERS | UNPICKLING))
    return found


def test_the_search_for_picklers_tells_a_key_from_a_pickler():
    for source in (
        "import pickle", "import pickle as p", "from pickle import loads", "pickle.loads(b)",
        "from multiprocessing.reduction import ForkingPickler", "socket.recv_pyobj()",
        "multiprocessing.reduction.pickle.loads(b)", "rpc.pickle.loads(b)", "x = pickle",
        "torch.load(f)", "importlib.import_module('pickle')", "__import__('_pickle')",
        "numpy.load(f, allow_pickle=True)", "codec.pickle", "class A:\n    pickle = pickle",
        "def f(pickle): return pickle",
    ):  # fmt: skip
        assert picklers_named(source), source
    for source in (
        "class RpcConfig:\n    pickle: str = key('local', 'help')", "config.rpc.pickle == 'never'",
        "rpc.pickle", "kwargs['pickle']", "'pickle'", "evolve(config.rpc, pickle='never')",
    ):  # fmt: skip
        assert not picklers_named(source), source


def test_pickle_lives_in_one_module(root, sources):
    """One audited module may unpickle; nothing else names it, nor a loader that would."""
    for path in sources:
        if path.relative_to(root).as_posix() == "core/src/hardpoint/rpc/codec.py":
            continue
        found = picklers_named(path.read_text())
        assert not found, f"{path.relative_to(root)} names {found}"


def test_no_assert_validates(root, sources):
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(root)}:{node.lineno}"


def test_the_tree_speaks_of_itself_alone(root):
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.split("\n")  # fmt: skip
    here = re.compile(rf"(?<![\w.)}}/-]){re.escape(str(root))}/")
    text_files = [root / name for name in tracked if name and (root / name).is_file()]
    for path in text_files:
        if path == Path(__file__):
            continue
        text = path.read_text(errors="replace")
        assert not here.search(text), f"{path} names the folder that it lies in"
        assert not re.search(r"trust_remote_code *= *True", text), path


def public_names(distributions) -> list[str]:
    """module: names defined in it that do not begin with an underscore."""
    lines = []
    for _, folder in sorted(distributions.items()):
        for path in sorted((folder / "src").glob("**/*.py")):
            relative = path.relative_to(folder / "src")
            if any(part.startswith("_") and part != "__init__.py" for part in relative.parts):
                continue
            names = set()
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
            module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            shown = sorted(name for name in names if not name.startswith("_"))
            if shown:
                lines.append(f"{module}: {' '.join(shown)}")
    return lines


def test_public_names_are_deliberate(distributions):
    """`python tests/architecture/test_shape.py` rewrites the list; read the difference first."""
    assert public_names(distributions) == PUBLIC_NAMES.read_text().splitlines()


def test_exports_are_what_all_says(distributions, monkeypatch):
    for package, folder in distributions.items():
        monkeypatch.syspath_prepend(folder / "src")  # those of third parties are not installed here
        module = importlib.import_module(package)
        exported = set(getattr(module, "__all__", ()))
        for name in exported:
            assert hasattr(module, name), f"{package}.__all__ names {name}, which is not there"


if __name__ == "__main__":
    top = Path(__file__).resolve().parents[2]
    found = {
        package.parent.name: project.parent
        for project in sorted(top.glob("**/pyproject.toml")) if ".venv" not in project.parts
        for package in (project.parent / "src").glob("*/__init__.py")
    }  # fmt: skip
    PUBLIC_NAMES.write_text("\n".join(public_names(found)) + "\n")
