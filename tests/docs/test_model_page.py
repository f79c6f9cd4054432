"""The model that a page shows works as it stands there, and its forward is the contract's."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "writing-a-model.md").read_text()
WORK = """
import json, sys
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from hardpoint.config.loading import load_config
from hardpoint_engine.build import start_engine

folder = Path(sys.argv[1])
Qwen3ForCausalLM(Qwen3Config(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)).save_pretrained(folder)
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps({**config, "architectures": ["AcmeForCausalLM"]}))

def built(worker):
    model = worker.get_model()
    return type(model).__name__, sorted(n for n in model.weight_slots() if "q_norm" in n)

keys = {"model": str(folder), "platform": "cpu", "num_kv_blocks": 8}
with start_engine(load_config(overrides=keys)) as core:
    print(core.executor.collective_rpc(built))
"""


def test_the_model_of_the_page_is_built_and_loaded(sample, tmp_path):
    acme = sample("writing-a-model.md")
    done = acme.run("-c", WORK.replace("sys.argv[1]", repr(str(tmp_path / "checkpoint"))))
    norms = [f"model.layers.{index}.self_attn.q_norm.weight" for index in range(2)]
    assert done.stdout.splitlines()[-1] == f"[{('AcmeForCausalLM', norms)}]"


def test_the_forward_of_the_page_is_the_contract():
    from hardpoint_runtime.models.language_model import LanguageModel

    (shown,) = re.findall(r"^```python\n(def forward.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    source = inspect.getsource(LanguageModel.forward)
    (ours,), (theirs,) = (ast.parse(inspect.cleandoc(text)).body for text in (source, shown))
    assert ast.dump(ours.args) == ast.dump(theirs.args)
    assert ast.dump(ours.returns) == ast.dump(theirs.returns)


def test_the_table_lists_what_is_built_in():
    from hardpoint.checkpoints.decoder_architectures import ARCHITECTURES

    listed = re.findall(r"^\| `(\w+)`", (DOCS / "models.md").read_text(), re.MULTILINE)
    assert sorted(name for name in listed if name.endswith("CausalLM")) == sorted(ARCHITECTURES)
