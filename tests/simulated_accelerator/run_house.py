"""Runs the default model on the cpu and on the simulated accelerator of ``hardpoint-acme``; prints
what came, as JSON.

A process of its own: the device is the process's. Argument: an empty folder for the plugin's
metadata.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ACME = Path(__file__).resolve().parents[2] / "examples" / "out_of_tree" / "hardpoint-acme"
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "In a small village by the sea there lived a fisherman who told everyone who would listen that",
]


def offer_plugin(folder):
    """Make the platform discoverable, as an installed distribution is."""
    metadata = Path(folder) / "hardpoint_acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hardpoint-acme\nVersion: 1.0\nRequires-Dist: hardpoint\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[hardpoint.platforms]\nacme = hardpoint_acme.plugin\n"
    )
    sys.path[:0] = [str(ACME / "src"), str(folder)]


def run(platform, **more):
    """Generate on ``platform``: greedy, drawn, penalised, with logprobs; chunked prefill."""
    from hardpoint_engine import LLM, SamplingParams

    sampling = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=2),
        SamplingParams(
            temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=5, max_tokens=8,
        ),
        SamplingParams(
            temperature=0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=8,
        ),
    ]  # fmt: skip
    options = {
        "executor": "uni",
        "dtype": "float32",
        "num_kv_blocks": 40,
        "block_size": 16,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        **more,
    }
    with LLM(platform=platform, prefill_chunk_size=8, **options) as llm:
        devices = llm.collective_rpc(devices_of_weights)[0]
        results = llm.generate(PROMPTS, sampling)
        steps = llm.collective_rpc(steps_by_mode)[0]
        reads = llm.collective_rpc(reads_of_the_port)[0]
    return {
        "steps": steps,
        "reads_by_port": reads,
        "tokens": [list(result.outputs[0].token_ids) for result in results],
        "devices": devices,
    }


def devices_of_weights(worker):
    return sorted({str(parameter.device) for parameter in worker.get_model().parameters()})


def reads_of_the_port(worker):
    return getattr(worker.device, "reads", None)


def steps_by_mode(worker):
    graphs = worker.model_runner.graphs
    return {} if graphs is None else {mode.name: n for mode, n in graphs.counts.steps.items()}


def run_counted(**more):
    """Generate on the accelerator; return also how the host read the device meanwhile."""
    from hardpoint_acme import torch_backend

    before = dict(torch_backend.READS)
    found = run("acme", **more)
    reads = {name: count - before.get(name, 0) for name, count in torch_backend.READS.items()}
    return {**found, "reads": reads}


def controls():
    """What the device must not let pass: proof that the counts above mean something."""
    import torch
    from hardpoint_acme import torch_backend

    tensor = torch.zeros(3, device="acme")
    try:
        tensor + torch.ones(3)
    except RuntimeError as error:
        mixed = str(error)
    else:
        mixed = ""
    before = torch_backend.READS.total()
    tensor.sum().item()
    tensor.cpu()
    torch.empty(3).copy_(tensor)
    return {"mixed": mixed, "reads": torch_backend.READS.total() - before}


def main():
    offer_plugin(sys.argv[1])
    graphs = {"graph_mode": "full_and_piecewise", "graph_sizes": [4, 24], "graph_warm_ups": 0}
    cpu = run("cpu")
    acme = run_counted()
    from hardpoint_acme import torch_backend
    from hardpoint_acme.platform import AcmePlatform

    report = {
        "cpu": cpu,
        "acme": acme,
        "calls": dict(torch_backend.CALLS),
        "module": dict(torch_backend.MODULE),
        "graphs": run_counted(**graphs, max_model_len=64),
    }
    AcmePlatform.worker_class = "unit_worker:UnitWorker"
    report["shared"] = run_counted(**graphs, max_model_len=64)
    report |= {"controls": controls(), "held": torch_backend.memory_allocated()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
