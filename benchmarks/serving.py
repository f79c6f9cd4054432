"""Tokens per second through `LLM` and through `transformers`, on the same weights, dtype and
threads.

    python benchmarks/serving.py [--dtype float32] [--repeats 7] [--threads 2] [--json]

The engines take turns, each in a process of its own (see `turns.py`); the medians and their ratio
are printed.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from typing import ClassVar

import turns


def generated(llm, tokens: list[list[int]], new: int) -> int:
    """Generate greedily, just ``new`` tokens a prompt."""
    from hardpoint_engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
    return sum(len(result.outputs[0].token_ids) for result in llm.generate(tokens, params))


class Hardpoint:
    """The cpu platform. ``keys`` are of the configuration, ``settings`` of the plugin."""

    keys: ClassVar[dict[str, object]] = {}
    settings: ClassVar[dict[str, object]] = {}

    def __init__(self, options: argparse.Namespace) -> None:
        from hardpoint_engine import LLM

        self.llm = LLM(
            model=options.model,
            platform="cpu",
            executor="uni",
            dtype=options.dtype,
            max_model_len=2048,
            plugins={"cpu": {"threads": options.threads, **self.settings}},
            **self.keys,
        )

    def run(self, tokens: list[list[int]], new: int) -> int:
        return generated(self.llm, tokens, new)


class Transformers:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from hardpoint.default_model import find_default_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        path = options.model or find_default_model()
        folder, _, name = str(path).rpartition("/")
        source = {"gguf_file": name} if name.endswith(".gguf") else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder if source else str(path), dtype=getattr(torch, options.dtype), **source
        )

    def run(self, tokens: list[list[int]], new: int) -> int:
        import torch

        ids = torch.tensor(tokens)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        return int((out.shape[1] - ids.shape[1]) * ids.shape[0])


ENGINES = {"hardpoint": Hardpoint, "transformers": Transformers}


def arguments(doc: str | None, engines: dict[str, type]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", default=None, help="default: the installed default model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=tuple(engines), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = arguments(__doc__, ENGINES).parse_args()
    if options.child:
        turns.serve(ENGINES[options.child](options))
        return
    with ExitStack() as stack:
        children = {name: stack.enter_context(turns.Child("--child", name)) for name in ENGINES}
        for child in children.values():
            child.ask()
        rows = turns.measured(children, turns.CASES, options.repeats, "hardpoint")
    if options.json:
        print(json.dumps({"dtype": options.dtype, "rows": rows}))
        return
    for row in rows:
        print(options.dtype, turns.text_of(row))


if __name__ == "__main__":
    main()
