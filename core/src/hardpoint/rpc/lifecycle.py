"""The order of a worker's life, what each method needs of it, and the capability behind it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from hardpoint.capabilities import Capability
from hardpoint.errors import LifecycleError


class Stage(IntEnum):
    """How far a worker has come."""

    BUILT = 0
    DEVICE = 1
    MODEL = 2
    CACHE = 3
    READY = 4
    CLOSED = 5


STEPS: Mapping[Stage, str] = {
    Stage.DEVICE: "init_device",
    Stage.MODEL: "load_model",
    Stage.CACHE: "initialize_from_config",
    Stage.READY: "compile_or_warm_up_model",
}
"""Stage -> the method that leads to it, from the stage before."""

_LEADS_TO = {method: stage for stage, method in STEPS.items()}

NEEDS: Mapping[str, Stage] = {
    **dict.fromkeys(
        (
            "get_kv_cache_spec", "get_kv_cache_layouts", "determine_available_memory",
            "get_cache_block_size_bytes", "update_max_model_len", "supported_tasks",
            "get_model_runner", "get_model", "apply_model", "reload_weights", "save_sharded_state",
            "add_lora", "remove_lora", "pin_lora", "list_loras", "add_prompt_adapter",
            "remove_prompt_adapter", "pin_prompt_adapter", "list_prompt_adapters",
            "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
        ),
        Stage.MODEL,
    ),
    **dict.fromkeys(("compile_or_warm_up_model", "sleep", "wake_up", "discard"), Stage.CACHE),
    **dict.fromkeys(
        ("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"),
        Stage.READY,
    ),
}  # fmt: skip
"""Method -> the stage it needs. Methods that are not here can be called at any stage."""

CAPABILITIES: Mapping[str, Capability] = {
    "execute_dummy_batch": Capability.DATA_PARALLEL,
    "take_draft_token_ids": Capability.SPECULATIVE,
    **dict.fromkeys(("add_lora", "remove_lora", "pin_lora", "list_loras"), Capability.LORA),
    **dict.fromkeys(
        (
            "add_prompt_adapter", "remove_prompt_adapter",
            "pin_prompt_adapter", "list_prompt_adapters",
        ),
        Capability.PROMPT_ADAPTERS,
    ),
    **dict.fromkeys(("sleep", "wake_up", "discard"), Capability.SLEEP),
    "reload_weights": Capability.WEIGHT_RELOAD,
    "save_sharded_state": Capability.SHARDED_STATE,
    "profile": Capability.PROFILE,
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), Capability.MULTIMODAL),
}  # fmt: skip
"""Method -> the capability that the platform must offer."""


class Lifecycle:
    """One worker's stage; transitions only, no I/O."""

    def __init__(self) -> None:
        self.stage = Stage.BUILT

    def require_open(self, method: str) -> None:
        """Raise LifecycleError if the worker was shut down."""
        if self.stage is Stage.CLOSED and method != "shutdown":
            raise LifecycleError(f"{method}: this worker was shut down; start a new executor")

    def require(self, method: str) -> None:
        """Raise LifecycleError naming the step that is missing, or that was done already."""
        self.require_open(method)
        goal = _LEADS_TO.get(method)
        if goal is not None and self.stage >= goal and method not in NEEDS:
            raise LifecycleError(f"{method}: was called already; a worker does it once")
        need = NEEDS.get(method, Stage.BUILT if goal is None else Stage(goal - 1))
        if self.stage < need:
            missing = [STEPS[stage] for stage in Stage if self.stage < stage <= need]
            raise LifecycleError(f"{method}: call {' and '.join(missing)} first")

    def done(self, method: str) -> None:
        """Note that ``method`` succeeded."""
        goal = _LEADS_TO.get(method)
        if goal is not None:
            self.stage = max(self.stage, goal)
