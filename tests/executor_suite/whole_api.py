"""Uses the whole API of an executor, and the engine over it, in a process of its own; prints what
was refused. Run as: whole_api.py EXECUTOR CHANNEL PICKLE FOLDER.
"""

from __future__ import annotations

import asyncio
import json
import sys

from attrs import evolve
from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.checkpoints import read_description
from hardpoint.config import resolution
from hardpoint.config.loading import load_config
from hardpoint.errors import HardpointError
from hardpoint.executor import Executor
from hardpoint.messages import NewRequestData, SchedulerOutput
from hardpoint.registry import Registry
from hardpoint.sampling_params import SamplingParams
from hardpoint.selection import select_executor, select_platform
from hardpoint_conformance.subject import plans

NOT_CALLED = {
    # by initialize_cache, by the engine without a seed
    "initialize_from_config", "compile_or_warm_up_model", "draw_seed",
    # for backends, or before there is an executor
    "listeners", "start", "start_workers", "call_workers", "probe_health", "stop_workers",
    "prepare",
    "called_from_worker", "fail",
    # attributes
    "world_size", "output_rank", "is_sleeping", "sleeping_tags", "max_concurrent_batches",
    "failure", "config", "platform", "placement", "logger", "supports_pp", "uses_ray",
    "supports_async_scheduling", "plans_alike", "tells_results",
}  # fmt: skip


def settings(executor, channel, pickle, workers):
    found = {
        "model": "dummy", "load_format": "dummy", "platform": "dummy", "executor": executor,
        "block_size": 4, "max_model_len": 64, "rpc.pickle": pickle,
        "max_loras": 1, "max_prompt_adapters": 1,
    }  # fmt: skip
    if executor == "mp":
        found |= {"plugins.mp.channel": channel, "plugins.dummy.num_workers": workers}
    return found


def started(keys):
    config = load_config(overrides=keys, environ={})
    registry = Registry.discover(config)
    platform = select_platform(registry, config)
    config = evolve(config, description=read_description("dummy", "dummy"))
    config = resolution.configure(config, registry, platform)
    config = resolution.fill_defaults(config, platform)
    chosen = select_executor(registry, config, platform)
    config = resolution.structure_plugins(config, registry)
    return chosen.start(config, registry, platform)


class Steps:
    def __init__(self):
        self.number = 0

    def __call__(self, **fields):
        self.number += 1
        request = NewRequestData(
            req_id=f"r{self.number}", prompt=(5, 6, 7), block_ids=((1, 2),),
            sampling=SamplingParams(temperature=0, seed=1, logprobs=2),
        )  # fmt: skip
        return SchedulerOutput(
            step_id=self.number, new=(request,), num_tokens={request.req_id: 3}, total_tokens=3,
            **fields,
        )  # fmt: skip


def no_more(worker):
    return worker.rank


def api(executor, folder):
    """Name -> a use of it, in an order that the life of workers allows."""
    lora = LoRARequest(id=1, name="a", path=str(folder))
    prompt = PromptAdapterRequest(id=2, name="p", path=str(folder), num_virtual_tokens=2)
    step = Steps()
    called = executor.collective_rpc
    return {
        "get_kv_cache_specs": executor.get_kv_cache_specs,
        "get_kv_cache_layout": executor.get_kv_cache_layout,
        "determine_available_memory": executor.determine_available_memory,
        "determine_num_available_blocks": executor.determine_num_available_blocks,
        "update_max_model_len": lambda: executor.update_max_model_len(64),
        "initialize_cache": lambda: executor.initialize_cache(plans(executor, 32)),
        "supported_tasks": executor.supported_tasks,
        "execute_model": lambda: executor.execute_model(step()),
        "execute_model_async": lambda: asyncio.run(executor.execute_model_async(step())),
        "sample_tokens": lambda: executor.sample_tokens(
            executor.execute_model(step(defer_sampling=True))
        ),
        "execute_dummy_batch": executor.execute_dummy_batch,
        "take_draft_token_ids": executor.take_draft_token_ids,
        "reset_prefix_cache": executor.reset_prefix_cache,
        "reset_mm_cache": executor.reset_mm_cache,
        "reset_encoder_cache": executor.reset_encoder_cache,
        "add_lora": lambda: executor.add_lora(lora),
        "pin_lora": lambda: executor.pin_lora(1),
        "list_loras": executor.list_loras,
        "remove_lora": lambda: executor.remove_lora(1),
        "add_prompt_adapter": lambda: executor.add_prompt_adapter(prompt),
        "pin_prompt_adapter": lambda: executor.pin_prompt_adapter(2),
        "list_prompt_adapters": executor.list_prompt_adapters,
        "remove_prompt_adapter": lambda: executor.remove_prompt_adapter(2),
        "profile": lambda: executor.profile(True, "x"),
        "stop_profile": executor.stop_profile,
        "start_profile": lambda: executor.start_profile("y"),
        "save_sharded_state": lambda: executor.save_sharded_state(str(folder)),
        "reload_weights": executor.reload_weights,
        "sleep": lambda: executor.sleep(1),
        "wake_up": executor.wake_up,
        "discard": lambda: executor.discard(["kv_cache"]),
        "reinitialize_distributed": lambda: executor.reinitialize_distributed(None),
        "stop_remote_worker_execution_loop": executor.stop_remote_worker_execution_loop,
        "stop_remote_worker_execution_loop_async": lambda: asyncio.run(
            executor.stop_remote_worker_execution_loop_async()
        ),
        "check_health": executor.check_health,
        "check_health_async": lambda: asyncio.run(executor.check_health_async()),
        "register_failure_callback": lambda: executor.register_failure_callback(print),
        "apply_model": lambda: executor.apply_model(lambda model: 1),
        "collective_rpc": lambda: called("list_loras", non_block=True).result(20),
        "collective_rpc of a function": lambda: called(no_more),
        "collective_rpc of a lambda": lambda: called(lambda worker: 1),
        "collective_rpc of an object": lambda: called("update_max_model_len", args=(object(),)),
        "collective_rpc that fails": lambda: called("no_such_method"),
        "collective_rpc that times out": lambda: called("get_model", timeout=0),
        "shutdown": executor.shutdown,
    }


def main(executor_name, channel, pickle, folder):
    from pathlib import Path

    keys = settings(executor_name, channel, pickle, 2)
    executor = started({**keys, "plugins.dummy.trace_folder": folder})
    uses = api(executor, Path(folder))
    public = {name for name in dir(Executor) if not name.startswith("_")}
    public -= {name for name in vars(executor) if not name.startswith("_")}
    refused = {}
    for name, use in uses.items():
        try:
            use()
        except HardpointError as error:
            refused[name] = [type(error).__name__, str(error)]
    from hardpoint_engine import LLM

    tokens = []
    with LLM(**settings(executor_name, channel, pickle, 1)) as llm:
        for output in llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0)):
            tokens += output.outputs[0].token_ids
    missed = sorted(public - NOT_CALLED - {name.split()[0] for name in uses})
    print(json.dumps({"refused": refused, "missed": missed, "tokens": len(tokens)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
