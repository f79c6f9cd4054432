"""What ``hardpoint-acme`` and ``hardpoint-threads`` do in the environment that they are installed
in, as JSON. Run by its interpreter.
"""

import importlib
import json
import sys
from types import ModuleType

from hardpoint_engine import LLM, SamplingParams

KEYS = {"load_format": "dummy", "num_kv_blocks": 64, "seed": 1, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def generate(prompts=("one", "two"), ask=None, **keys):
    """Return the tokens, and what ``ask`` says of each worker."""
    with LLM(**{**KEYS, **keys}) as llm:
        results = llm.generate(list(prompts), GREEDY)
        told = llm.collective_rpc(ask) if ask else None
    return [list(result.outputs[0].token_ids) for result in results], told


def types_of_weights(worker):
    from collections import Counter

    types = Counter(str(each.dtype) for each in worker.get_model().parameters())
    offers = worker.registry.offers("hardpoint_quantizations", "acme")
    return dict(types), offers["acme8"].reference


def own_operations(worker):
    runner = worker.get_model_runner()
    return runner.operations.own, [
        c.reference for c in runner.operations.choices if c.name == "rms_norm"
    ]


def is_module(value):
    """By its own type: some of torch's objects warn when they are asked for their class."""
    return issubclass(type(value), ModuleType)


def attributes():
    """(module, name) or (module, class, name) -> object, of torch and ours: what may be patched."""
    found = {}
    for name, module in list(sys.modules.items()):
        top = name.split(".")[0]
        if (
            module is None
            or top == "hardpoint_acme"
            or not (top == "torch" or top.startswith("hardpoint"))
        ):
            continue
        for key, value in list(vars(module).items()):
            if not callable(value) and not is_module(value):
                continue
            found[name, key] = value
            if (
                issubclass(type(value), type)
                and value.__module__ == name
                and not name.startswith("torch._C")
            ):
                found.update({(name, key, each): part for each, part in list(vars(value).items())})
    return found


def imported(name):
    """What of a plugin is imported: of that no comparison from now on would tell."""
    return sorted(each for each in sys.modules if each.partition(".")[0] == f"hardpoint_{name}")


def is_code(value):
    return callable(value) or issubclass(type(value), property | classmethod | staticmethod)


def is_imported(value):
    """Whether it is a module of a file, which its package has from its first import on, or a
    namespace of ``torch.ops``, which is there when it was first asked for.
    """
    of_operations = type(value).__module__ == "torch._ops"
    return is_module(value) and (of_operations or value.__spec__ is not None)


def patches(before, after):
    """Code that is another now, or new in a module or class that was there."""
    modules = {key[0] for key in before}
    changed = [
        key for key, value in before.items() if is_code(value) and after.get(key) is not value
    ]
    new = [
        key for key, value in after.items()
        if key not in before and key[0] in modules and (is_code(value) or is_module(value))
        and not is_imported(value)
    ]  # fmt: skip
    return sorted(".".join(key) for key in {*changed, *new})


def made_by(worker):
    """make_* method -> the module that it is of."""
    runner = worker.get_model_runner()
    return {
        f"{kind}.{name}": getattr(type(owner), name).__module__
        for kind, owner in (("worker", worker), ("runner", runner), ("device", worker.device))
        for name in dir(type(owner)) if name.startswith("make_")
    }  # fmt: skip


def extra_records():
    """A request's own record goes to the worker, a step's comes back, without any pickle."""
    import time

    from hardpoint_acme.messages import BankRequest
    from hardpoint_engine.request import EngineRequest

    with LLM(platform="acme", executor="mp", rpc={"pickle": "never"}, **KEYS) as llm:
        extra = {"acme": BankRequest(bank=5)}
        request = EngineRequest(
            req_id="banked", prompt=(3, 4), sampling=GREEDY, arrival=time.monotonic(), extra=extra
        )
        llm.core.add_request(request)
        while llm.core.has_unfinished():
            llm.core.step()
        (told,) = llm.collective_rpc("last_report")
    return dict(told.banks), told.sampled


def main():
    graphs = {"graph_mode": "full", "max_num_seqs": 2, "batch_timing_interval": 60.0}
    several = {"executor": "threads", "tensor_parallel_size": 2}
    report = {"uni": generate(platform="dummy", executor="uni")[0], "early": imported("threads")}
    importlib.import_module("torch")  # the fake device has no use for it
    before = attributes()
    report["threads"] = generate(platform="dummy", executor="threads")[0]
    report["patches"] = patches(before, attributes())
    report["cpu"] = generate(platform="cpu", **graphs)[0]
    generate(platform="cpu", **several)
    report["early"] += imported("acme")
    before = attributes()
    report["acme"], (report["parts"],) = generate(ask="collaborators", platform="acme", **graphs)
    report["made"] = generate(ask=made_by, platform="acme")[1][0]
    report["operations"] = generate(ask=own_operations, platform="acme")[1][0]
    keys = {"platform": "acme", "quantization": "acme8"}
    report["packed"], (report["types"],) = generate(ask=types_of_weights, **keys)
    report["sharded"], parts = generate(ask="collaborators", platform="acme", **several)
    report["communicators"] = [part["communicator"] for part in parts]
    report["patches"] += patches(before, attributes())
    report["extra"] = extra_records()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
