"""Runners whose LoRA adapters compute something else: a Llama in numpy behind the dummy's blocks.

The fake model has no matrices for an adapter to change. Here the cells stand for prefixes of
tokens, and what a prefix says is computed by the kit's own reference, anew each time.
"""

from __future__ import annotations

from functools import cache

from broken_runners import Runner
from hardpoint_conformance.llama_oracle import LlamaOracle, changes_of
from hardpoint_conformance.oracle import Oracle
from hardpoint_dummy.model import FakeModel
from mutation import broken

COMPUTES = "test_an_adapter_computes_what_its_files_say"


class Reference(Oracle):
    """What these runners are compared with: the kit's, without states and real checkpoints."""

    name = "the kit's Llama"

    def __init__(self, description, oracle=None):
        self.description = description
        self.oracle = oracle or LlamaOracle(description)

    def logits(self, tokens):
        return self.oracle.logits(tokens)

    def adapted(self, adapter):
        return Reference(self.description, self.oracle.adapted(adapter))


class NumpyModel(FakeModel):
    """What a cell stands for is remembered: its adapter, and the tokens up to it."""

    def __init__(self, runner, vocab_size):
        super().__init__(1, vocab_size)
        self.runner = runner
        self.prefixes = {}
        self.oracle_of = cache(self.oracle_of)

    def cell(self, before, content, salt):
        made = super().cell(before, content, salt)
        _, tokens = self.prefixes.get(before, (salt, ()))
        self.prefixes[made] = (salt, (*tokens, content % self.vocab_size))
        return made

    def state(self, groups):
        return next(iter(groups))[-1]

    def best(self, state):
        row = self.logits(state)
        return row.index(max(row))

    def logits(self, state):
        adapter, tokens = self.prefixes[state]
        return self.oracle_of(adapter).logits(tokens)[-1].tolist()

    def oracle_of(self, adapter):
        oracle = LlamaOracle(self.runner.config.description)
        changes = self.runner.changes(self.runner.loras.use(adapter)) if adapter else {}
        for name, change in changes.items():
            oracle.weights[name] = oracle.weights[name] + change
        return oracle


class NumpyRunner(Runner):
    """Computes the kit's model; a mutant changes what an adapter adds to which matrix."""

    numpy = True

    def reload_weights(self, path):
        report = super().reload_weights(path)
        self._model = NumpyModel(self, self.config.description.vocab_size)
        return report

    def salt(self, state):
        return state.lora.id if state.lora is not None else 0

    def changes(self, adapter):
        """Return weight's name -> what the adapter adds to it."""
        return changes_of(adapter.path)


@broken("nothing")
class TwinAdapters(NumpyRunner):
    """Unbroken."""


@broken("an adapter's scale is lora_alpha, whatever its rank", COMPUTES)
class ScaledByAlpha(NumpyRunner):
    def changes(self, adapter):
        rank = {1: 4, 2: 2}[adapter.id]
        return {name: each * rank for name, each in super().changes(adapter).items()}


@broken("an adapter's scale is 1", COMPUTES)
class Unscaled(NumpyRunner):
    def changes(self, adapter):
        scale = {1: 4, 2: 1.5}[adapter.id]
        return {name: each / scale for name, each in super().changes(adapter).items()}


@broken("an adapter's scale is lora_alpha / the largest rank", COMPUTES)
class ScaledByTheLargestRank(NumpyRunner):
    def changes(self, adapter):
        factor = {1: 1, 2: 0.5}[adapter.id]
        return {name: each * factor for name, each in super().changes(adapter).items()}


def renamed(changes, **names):
    """Return changes under other names of matrices."""
    found = {}
    for name, each in changes.items():
        old = next((each for each in names if each in name), "")
        found[name.replace(old, names[old]) if old else name] = each
    return found


@broken("an adapter of the values is applied to the keys", COMPUTES)
class OnTheWrongProjection(NumpyRunner):
    def changes(self, adapter):
        return renamed(super().changes(adapter), v_proj="k_proj")


@broken("the gate and the other half of the feed-forward are exchanged in an adapter", COMPUTES)
class GateForUp(NumpyRunner):
    def changes(self, adapter):
        return renamed(super().changes(adapter), gate_proj="up_proj", up_proj="gate_proj")


@broken("an adapter of one layer is applied to the other", COMPUTES)
class OnTheWrongLayer(NumpyRunner):
    def changes(self, adapter):
        first, second = "layers.0.", "layers.1."
        return renamed(super().changes(adapter), **{first: second, second: first})


@broken("an adapter is applied to the attention alone", COMPUTES)
class AttentionAlone(NumpyRunner):
    def changes(self, adapter):
        return {name: each for name, each in super().changes(adapter).items() if "mlp" not in name}


@broken("an adapter's half of the heads is left out", COMPUTES)
class HalfOfTheRows(NumpyRunner):
    def changes(self, adapter):
        found = super().changes(adapter)
        for each in found.values():
            each[len(each) // 2 :] = 0
        return found
