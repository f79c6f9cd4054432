"""What the steps of ``gpu_check.sh`` share: engines, models, and how they tell what they found."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

PROMPTS = [[1000 + 7 * n + 3 * place for place in range(length)]
           for n, length in enumerate((5, 17, 33, 64))]  # fmt: skip
TINY_PROMPTS = [[token % 90 for token in prompt] for prompt in PROMPTS]
NEW = 24
KV_BLOCKS = 4096
"""Of an engine whose memory is not the question: no time goes into measuring it."""
FOUND: dict = {}
"""What this step has found so far."""


class FailedError(Exception):
    """What was to be shown is not so."""


class SkippedError(Exception):
    """This step cannot run here, for a reason that is no fault."""


TINY = {"hidden": 32, "inner": 48, "heads": 4, "kv_heads": 2, "vocabulary": 97, "layers": 2}
LIKE_DEFAULT = {
    "hidden": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "layers": 30,
}  # fmt: skip
"""The default model's shape: what takes its place where it could not be carried along."""


def random_model(folder: Path, hidden: int, inner: int, heads: int, kv_heads: int,
                 vocabulary: int, layers: int) -> str:  # fmt: skip
    """Write a random Llama, spread enough that it does not repeat itself, and a tokenizer; return
    its folder.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "vocab_size": vocabulary, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{token}": token for token in range(vocabulary)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(0)
    narrow = hidden * kv_heads // heads
    shapes = {"model.embed_tokens": (vocabulary, hidden)}
    ones = ["model.norm"]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj": (hidden, hidden),
            at + "self_attn.o_proj": (hidden,) * 2,
        }
        shapes |= {at + f"self_attn.{each}_proj": (narrow, hidden) for each in "kv"}
        shapes |= {at + f"mlp.{each}_proj": (inner, hidden) for each in ("gate", "up")}
        shapes[at + "mlp.down_proj"] = (hidden, inner)
        ones += [at + "input_layernorm", at + "post_attention_layernorm"]
    weights = {
        f"{name}.weight": torch.randn(*shape, generator=generator) * (2.9 / hidden) ** 0.5
        for name, shape in shapes.items()
    }
    save_file(weights | {f"{n}.weight": torch.ones(hidden) for n in ones},
              str(folder / "model.safetensors"))  # fmt: skip
    return str(folder)


class House:
    """Engines for the steps: on the GPU, or (``dry``) on host memory with a tiny model."""

    no_sleep = ""
    """Why engines start without memory that sleeps; empty: they do not."""

    def __init__(self, model: str | None, *, dry: bool, scratch: Path) -> None:
        self.dry = dry
        self.model = model
        if model == "random" or (model is None and (dry or not default_model_is_here())):
            self.model = random_model(scratch, **(TINY if dry else LIKE_DEFAULT))
        self.prompts = TINY_PROMPTS if dry else PROMPTS
        self.new = 6 if dry else NEW

    def start(self, platform: str = "cuda", *, must_sleep: bool = False, **keys: object):
        """Return an engine. One that cannot start with memory that sleeps starts without, and
        :attr:`no_sleep` says why, unless it must.
        """
        from hardpoint_engine import LLM

        given = {"model": self.model, "platform": platform, "executor": "uni", "dtype": "float32",
                 "max_model_len": 160 if self.dry else 1024, "num_kv_blocks": KV_BLOCKS,
                 "max_num_seqs": 16 if self.dry else 32, "graph_mode": "none"}  # fmt: skip
        if self.dry:
            given |= {"max_num_batched_tokens": 256, "num_kv_blocks": 64}
            if platform == "cuda":
                given["plugins"] = {"cuda": {"substitute": "host", "substitute_bytes": 8 << 30}}
        given |= keys
        if platform != "cuda" or self.dry or must_sleep:
            return LLM(**given)
        if not self.no_sleep:
            try:
                return LLM(**given)
            except Exception as error:  # noqa: BLE001 - the second try shows whether it was that
                self.no_sleep = f"{type(error).__name__}: {error}"[:1000]
            so_far({"started without sleep, since with it": self.no_sleep})
            gc.collect()
        try:
            return LLM(**given, plugins={"cuda": {"sleep": "off"}})
        except Exception as error:
            reason = f"{error}; with plugins.cuda.sleep = 'auto': {self.no_sleep}"
            raise RuntimeError(reason) from error

    def ids(self, llm, prompts=None, new=None) -> list[list[int]]:
        """Generate greedily."""
        from hardpoint_engine import SamplingParams

        new = new or self.new
        params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
        return [
            list(each.outputs[0].token_ids)
            for each in llm.generate(prompts or self.prompts, params)
        ]

    def seconds(self, llm, batch: int, new: int, turns: int) -> float:
        """Return the least seconds of some turns, each with other prompts."""
        most = 90 if self.dry else 40000
        taken = []
        for turn in range(turns + 1):
            prompts = [[(turn * 131 + row * 17 + place * 7) % most for place in range(16)]
                       for row in range(batch)]  # fmt: skip
            started = time.perf_counter()
            self.ids(llm, prompts, new)
            taken.append(time.perf_counter() - started)
        return min(taken[1:])


def default_model_is_here() -> bool:
    from hardpoint.default_model import find_default_model
    from hardpoint.errors import ConfigError

    try:
        find_default_model()
    except ConfigError:
        return False
    return True


def so_far(told: dict) -> None:
    """Leave what a step has found, should it be cut or fail."""
    FOUND.update(told)
    print(json.dumps(FOUND), flush=True)


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise FailedError(f"{what}: {found} instead of {expected}")


def on_worker(llm, function: Callable) -> object:
    return llm.collective_rpc(function)[0]
