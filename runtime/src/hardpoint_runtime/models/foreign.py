"""Any other architecture: transformers' own modelling code, over our paged attention.

Slower than a built-in model, and whole on one rank. The tokens of a step are one sequence to that
code, with positions of their own; only attention tells requests apart. A model is taken if all that
its tokens see of each other goes through its attention function, which a forward on the meta device
shows before any memory is given. No code of a checkpoint is run: configuration and model are
classes of the installed transformers.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from hardpoint.checkpoints.description import ModelDescription
from hardpoint.errors import CheckpointError, HardpointError, UnsupportedModelError
from hardpoint.kv_cache import KVCacheSpec
from torch import nn

from hardpoint_runtime import forward_context
from hardpoint_runtime.forward_context import ForwardContext
from hardpoint_runtime.models import foreign_attention
from hardpoint_runtime.models.foreign_attention import Probe, layer_name
from hardpoint_runtime.models.language_model import Carried, LanguageModel
from hardpoint_runtime.models.layers import Slot
from hardpoint_runtime.operations import Operations
from hardpoint_runtime.parallel.seat import ALONE, Seat

_logger = logging.getLogger("hardpoint.models")

EXTRA = "pip install 'hardpoint-runtime[transformers]'"
KNOWN_TYPES = {"full_attention", "sliding_attention"}
MOST = 1 << 16
"""Layers, heads, experts and their like, each of which is a module to be made."""
IGNORED = re.compile(
    r"(\.|^)(rotary_emb\.inv_freq|attention\.(masked_)?bias|attn\.(masked_)?bias)$"
)
"""Tensors of older checkpoints that are no weights."""


class ForeignModel(LanguageModel):
    """A causal language model of transformers."""

    can_split: ClassVar[bool] = False

    def __init__(
        self, description: ModelDescription, operations: Operations, *, seat: Seat = ALONE
    ) -> None:
        super().__init__(description, operations, seat=seat)
        whole = _built(description)
        _check_amount(description, whole)
        self.attending, output = _probed(description, whole)
        self.places = _places(description, whole)
        self.ignored = [re.compile(each) for each in _ignored(whole)]
        self.tied = tuple(getattr(whole, "all_tied_weights_keys", None) or ())
        self.whole = whole
        self.body = whole.base_model
        self.given = _Given(output)
        setattr(whole, whole.base_model_prefix, self.given)
        for module in self.body.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, foreign_attention.OPERATIONS, operations)
        _logger.warning(
            "architecture %s is not native: transformers' modelling code is used, slower; it runs "
            "whole on one rank",
            description.architecture,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardContext | None = None,
        rows: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """Return hidden states; see :class:`LanguageModel`."""
        step = forward_context.current() if step is None else step
        with forward_context.entered(step):
            out = self.body(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden if rows is None else hidden.index_select(0, rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits; see :class:`LanguageModel`. What the code does behind its body,
        such as scaling, is done too.
        """
        self.given.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self.whole(input_ids=ids, use_cache=False).logits
        self.given.hidden = None
        return logits[0].float()

    def kv_cache_spec(self, block_size: int, dtype: str) -> Mapping[str, KVCacheSpec]:
        """One full-attention spec a layer, as the layers were seen to attend."""
        return {
            layer_name(index): KVCacheSpec(
                block_size=block_size,
                num_kv_heads=shape.kv_heads,
                head_size_k=shape.head_k,
                head_size_v=shape.head_v,
                dtype=dtype,
            )
            for index, shape in sorted(self.attending.layers.items())
        }

    def weight_slots(self) -> Mapping[str, Slot]:
        """Return the checkpoint's names and where they go."""
        return {
            name: Slot(
                module=place.module,
                parameter=place.name,
                start=0,
                shape=tuple(getattr(place.module, place.name).shape),
            )
            for name, place in self.places.items()
        }

    def is_ignorable(self, name: str) -> bool:
        """What transformers would leave out too: tied weights and remains of older versions."""
        return (
            super().is_ignorable(name)
            or name in self.tied
            or bool(IGNORED.search(name))
            or any(each.search(name) for each in self.ignored)
        )

    def materialise(self, device: torch.device, dtype: torch.dtype) -> None:
        """See :class:`LanguageModel`. Tensors that are no parameters are computed anew."""
        super().materialise(device, dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for module in self.modules():
                own = dict(module.named_buffers(recurse=False))
                for name, tensor in own.items():
                    is_saved = name in module.state_dict()
                    empty = torch.empty_like(tensor, device=device)
                    module.register_buffer(name, empty, persistent=is_saved)
                if own:
                    # The only code that knows how they are made; it may draw weights, too.
                    self.whole._init_weights(module)  # noqa: SLF001 - made to be overridden


@frozen(kw_only=True, eq=False)
class Place:
    """One tensor of a module."""

    module: nn.Module
    name: str


class _Given(nn.Module):
    """Stands where the body of a model was, and gives what the body gave before."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the hidden states as the body would."""
        return self.output(last_hidden_state=self.hidden)


def _built(description: ModelDescription) -> Any:
    """Return the model of transformers, on the meta device if that is the current one."""
    architecture = description.architecture
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedModelError(
            f"{description.path}: architecture {architecture} is not built in, and transformers, "
            f"whose code would be used, is not installed ({error}): {EXTRA}"
        ) from error
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kind = description.hf_config.get("model_type")
    for key, value in description.hf_config.items():
        if key.startswith(("num_", "n_")) and type(value) is int and value > MOST:
            raise CheckpointError(f"{description.path}: {key} is {value}, more than {MOST}")
    named = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind))
    if named != architecture:
        raise UnsupportedModelError(
            f"{description.path}: transformers {transformers.__version__} has no language model "
            f"{architecture} of model_type {kind!r}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(description.hf_config))
    except Exception as error:
        raise _refused(description, f"its configuration is not understood: {error}") from error
    _check(description, config)
    model_class = getattr(transformers, architecture)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise _refused(description, "it does not attend through an attention function")
    if getattr(model_class, "_is_stateful", False):
        raise _refused(description, "it keeps a state that is no keys and values")
    foreign_attention.register(
        importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    )
    try:
        with torch.random.fork_rng(devices=[]):
            whole = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation=foreign_attention.NAME, dtype=torch.float32
            ).eval()
    except Exception as error:
        raise _refused(description, f"it cannot be built: {error}") from error
    return whole


def _check_amount(description: ModelDescription, whole: Any) -> None:
    """Refuse a configuration that its files belie, before anything of its size is allocated."""
    if not description.path.is_dir():
        return  # no files to speak of: weights are made up
    held = sum(file.stat().st_size for file in description.path.glob("*.safetensors"))
    needed = sum(parameter.numel() for parameter in whole.parameters())
    if needed > held * 8:  # a bit for each element is the least there can be
        raise CheckpointError(
            f"{description.path}: the configuration makes {needed} elements, more than the {held} "
            "bytes of the files can hold: they do not belong together"
        )


def _check(description: ModelDescription, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", 0):
        raise _refused(description, "it has cross attention")
    others = set(getattr(config, "layer_types", None) or ()) - KNOWN_TYPES
    if others:
        raise _refused(description, f"it has layers of {', '.join(sorted(others))}")
    if getattr(config, "attention_chunk_size", None):
        raise _refused(description, "it attends in chunks")
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [table for table in rope.values() if isinstance(table, dict)] or [rope]
    if any(table.get("rope_type") in ("dynamic", "longrope") for table in tables):
        raise _refused(description, "its rotary angles depend on the longest text of a batch")


def _probed(description: ModelDescription, whole: Any) -> tuple[Probe, type]:
    """Return which layers attend, and the type that the body returns."""
    if whole.base_model is whole:
        raise _refused(description, "its body and its output projection are one")
    probe = Probe()
    step = ForwardContext(extra={foreign_attention.PROBE: probe})
    ids = torch.zeros((1, 3), dtype=torch.int64, device="meta")
    try:
        with forward_context.entered(step), torch.no_grad():
            out = whole.base_model(input_ids=ids, position_ids=ids, use_cache=False)
    except HardpointError as error:
        raise _refused(description, str(error)) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _refused(description, f"it does more than tensors tell ({reason})") from error
    if sorted(probe.layers) != list(range(description.num_layers)):
        raise _refused(
            description,
            f"{len(probe.layers)} of its {description.num_layers} layers attend through an "
            "attention function",
        )
    return probe, type(out)


def _places(description: ModelDescription, whole: Any) -> dict[str, Place]:
    """Return the checkpoint's name of each tensor that it has -> its place; of tied ones one."""
    modules = dict(whole.named_modules())
    kept = set(whole.state_dict())
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    names = {id(tensor): name for name, tensor in tensors.items()}
    loading = importlib.import_module("transformers.core_model_loading")
    found = {}
    for saved, tensor in loading.revert_weight_conversion(whole, tensors).items():
        if id(tensor) not in names:
            raise _refused(description, f"its {saved} is converted when it is loaded")
        owner, _, name = names[id(tensor)].rpartition(".")
        found[saved] = Place(module=modules[owner], name=name)
    return found


def _ignored(whole: Any) -> tuple[str, ...]:
    return tuple(getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ())


def _refused(description: ModelDescription, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{description.path}: architecture {description.architecture} is not built in, and "
        f"transformers' code for it cannot be used: {reason}"
    )
