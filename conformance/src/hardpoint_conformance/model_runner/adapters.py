"""LoRA adapters and soft prompts: whose they are, and what they compute."""

from __future__ import annotations

from hardpoint.adapters import LoRARequest, PromptAdapterRequest
from hardpoint.capabilities import Capability
from hardpoint.worker import Worker

from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.generation import Bench, scored_if
from hardpoint_conformance.kit_adapter import ADAPTERS, write_adapter
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.suite import needs, own_workers

PROMPT = (5, 9, 3, 77, 20, 21)


class AdapterTests(ModelRunnerPart):
    """Each on workers that have room for adapters."""

    @own_workers
    @needs(Capability.LORA)
    def test_an_adapter_computes_what_its_files_say(self) -> None:
        """Of another rank, scale and choice of matrices each: against the reference with ``W + B A
        lora_alpha / r`` in the place of ``W``.
        """
        bench = self.other(max_loras=len(ADAPTERS))
        sampling = scored_if(self.supports(Capability.LOGPROBS))
        for adapter in self._loaded(bench):
            request = bench.steps.alone(PROMPT, 6, sampling, lora=adapter)
            with bench.adapted(adapter) as known:
                if known:
                    what = f"with an adapter of {ADAPTERS[adapter.id - 1]}"
                    bench.check_greedy(request, what)
                    if request.logprobs:
                        bench.check_scores(request, what)
        self.subject.end(bench.executor)

    @own_workers
    @needs(Capability.LORA)
    def test_an_adapter_is_of_the_requests_that_name_it(self) -> None:
        """Beside each other: the plain answer stays, and the adapter's own differs."""
        bench = self.other(max_loras=len(ADAPTERS))
        adapters = self._loaded(bench)
        alone = [bench.steps.alone(PROMPT, 8, lora=adapter).output for adapter in adapters]
        plain = bench.steps.add(PROMPT)
        tuned = [bench.steps.add(PROMPT, lora=adapter) for adapter in adapters]
        bench.steps.run(8)
        bench.check_greedy(plain, "a request without an adapter beside some with")
        expect(
            [each.output for each in tuned] == alone and alone[0] != alone[1]
            and plain.output not in alone,
            "an adapter changes the requests that name it, and those alone",
            seen=f"plain {plain.output}; with adapters alone {alone}, together "
            f"{[each.output for each in tuned]}",
            where=Worker.add_lora, do="Give each row of a batch its own adapter's index.",
        )  # fmt: skip
        expect_equal(
            bench.executor.list_loras(), frozenset({1, 2}), "list_loras has what was added",
            where=Worker.list_loras, do="Return the ids of the loaded adapters.",
        )  # fmt: skip
        expect_equal(
            [bench.executor.remove_lora(number) for number in (1, 1, 99)], [True, False, False],
            "remove_lora says whether there was such an adapter", where=Worker.remove_lora,
            do="Return False for an id that is not loaded.",
        )  # fmt: skip
        self.subject.end(bench.executor)

    def _loaded(self, bench: Bench) -> list[LoRARequest]:
        """Write the kit's adapters and have them loaded."""
        made = []
        for number, adapter in enumerate(ADAPTERS, 1):
            folder = self.subject.scratch(f"adapter-{number}")
            write_adapter(folder, bench.description, adapter)
            made.append(
                LoRARequest(id=number, name=f"a{number}", path=str(folder), digest=str(number))
            )
            bench.executor.add_lora(made[-1])
        return made

    @own_workers
    @needs(Capability.PROMPT_ADAPTERS)
    def test_a_soft_prompt_is_of_the_requests_that_name_it(self) -> None:
        """It takes the place of the first positions."""
        bench = self.other(max_prompt_adapters=1)
        adapter = PromptAdapterRequest(
            id=1, name="soft", path=str(self.subject.scratch("soft")), num_virtual_tokens=2
        )
        bench.executor.add_prompt_adapter(adapter)
        soft = bench.steps.alone(PROMPT, 6, prompt_adapter=adapter).output
        again = bench.steps.alone((7, 7, *PROMPT[2:]), 6, prompt_adapter=adapter).output
        plain = bench.steps.alone(PROMPT, 6)
        bench.check_greedy(plain, "a request without a soft prompt after one with")
        expect(
            soft == again and soft != plain.output,
            "a soft prompt takes the place of its first positions, of those who name it",
            seen=f"with it {soft} and {again}, without {plain.output}",
            where=Worker.add_prompt_adapter, do="Replace the embeddings of the first positions.",
        )  # fmt: skip
