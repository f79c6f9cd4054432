"""One test or two of every other capability: what it promises, against the same oracle."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from attrs import evolve
from hardpoint.capabilities import Capability
from hardpoint.errors import ConfigError, RemoteError
from hardpoint.messages import Logprobs, ModelRunnerOutput, NewRequestData
from hardpoint.model_runner import ModelRunner
from hardpoint.worker import Worker

from hardpoint_conformance import in_worker
from hardpoint_conformance.contract import expect, expect_equal
from hardpoint_conformance.default_answer import ANSWER, DECIDED, TOLERANCE, installed_model
from hardpoint_conformance.default_answer import PROMPT as DEFAULT_PROMPT
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.llama_oracle import LlamaOracle
from hardpoint_conformance.model_runner.part import ModelRunnerPart
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.suite import needs, not_applicable, own_workers

PROMPT = (5, 9, 3, 77, 20, 21)


class FeatureTests(ModelRunnerPart):
    """Each starts workers of its own where it needs another configuration."""

    def test_records_of_others_pass_through(self) -> None:
        """``extra`` of a plugin that is not this one reaches the runner, and changes nothing."""
        bench = self.bench
        wanted = bench.steps.alone(PROMPT, 4).output
        of_request, of_step = {"somebody-else": {"note": [1, 2]}}, {"somebody-else": {"step": 1}}
        request = bench.steps.add(PROMPT, extra=of_request)
        bench.executor.collective_rpc(in_worker.keep_plans)
        bench.steps.step({request.req_id: len(PROMPT)}, extra=of_step)
        for plans in bench.executor.collective_rpc(in_worker.kept_plans):
            seen = [(dict(plan.extra), [dict(new.extra) for new in plan.new]) for plan in plans]
            expect_equal(
                seen, [(of_step, [of_request])],
                "the records of other plugins in extra arrive at the runner as they were sent",
                where=NewRequestData, do="Hand the plan to the runner as the worker got it.",
            )  # fmt: skip
        bench.steps.run(4)
        expect_equal(
            request.output, wanted, "the records of other plugins in extra are passed on untouched",
            where=NewRequestData, do="Look only at the record under your own name.",
        )  # fmt: skip

    def test_a_plan_arrives_and_its_output_leaves_as_they_are(self) -> None:
        """A step's number and generation come back; ``extra`` of an output maps names."""
        bench = self.bench
        bench.steps.add(PROMPT)
        output = bench.steps.round()
        names = [type(name).__name__ for name in output.extra]
        expect(
            output.generation == bench.executor.generation and set(names) <= {"str"},
            "an output has its step's generation, and records by plugin name in extra",
            seen=f"generation {output.generation}, extra keys of {names}",
            where=ModelRunnerOutput, do="Copy step_id and generation from the plan.",
        )  # fmt: skip

    @own_workers
    def test_the_default_model_says_what_was_recorded(self) -> None:
        """A real checkpoint, where it is installed; packed weights, a real vocabulary."""
        model = installed_model()
        if model is None:
            not_applicable("the default model is not installed")
        if not isinstance(self.bench.oracle, LlamaOracle):
            not_applicable("the platform's model is a rule of its own")
        bench = self.other(model=str(model))
        count = next(n for n, each in enumerate(ANSWER) if each.gap < DECIDED)
        scored = self.supports(Capability.LOGPROBS)
        sampling = evolve(GREEDY, logprobs=1) if scored else GREEDY
        request = bench.steps.alone(DEFAULT_PROMPT, count, sampling)
        expect_equal(
            request.output, [each.token for each in ANSWER[:count]],
            "the default model's greedy answer is the recorded one", where=ModelRunner.load_model,
            do="The kit's own model passes? Then look at packed weights, tied embeddings, and "
            "sizes that are no powers of two.",
        )  # fmt: skip
        off = [
            abs(row.values[0][0] - each.logprob)
            for row, each in zip(request.logprobs, ANSWER, strict=False)
        ]
        expect(
            max(off, default=0) <= TOLERANCE, "the default model's log-probabilities are the "
            "recorded ones", seen=f"off by up to {max(off, default=0):.3g}", where=Logprobs,
            do="Compare the layers' outputs with a reference, one by one.",
        )  # fmt: skip
        self.subject.end(bench.executor)

    @own_workers
    @needs(Capability.LOGPROBS_MODES)
    def test_scores_of_processed_logits_show_what_can_be_chosen(self) -> None:
        """``logprobs_mode``: processed ones have minus infinity where nothing can be chosen."""
        bench = self.other(logprobs_mode="processed_logprobs")
        allowed = (30, 31, 32)
        sampling = evolve(GREEDY, logprobs=3, allowed_token_ids=allowed)
        request = bench.steps.alone(PROMPT, 3, sampling)
        for row in request.logprobs:
            expect(
                set(row.ids[0][1:4]) == set(allowed)
                and abs(sum(map(math.exp, row.values[0][1:4])) - 1) < 0.01,
                "with logprobs_mode = processed_logprobs the scores are of the logits that a token "
                "is chosen from",
                seen=f"ids {row.ids[0]}, values {row.values[0]} though only {allowed} are allowed",
                where=Logprobs, do="Normalise after the edits, not before.",
            )  # fmt: skip
        self.subject.end(bench.executor)

    @own_workers
    @needs(Capability.ASYNC_SCHEDULING)
    def test_two_steps_in_flight_give_the_same_answer(self) -> None:
        """The second is planned before the first is known: the workers fill the token in."""
        bench = self.other(async_scheduling=True)
        request = bench.steps.add(PROMPT)
        bench.steps.run(1)
        futures: list[tuple[Any, Future[Any]]] = []
        for _ in range(6):
            plan = bench.steps.plan({request.req_id: 1})
            running = evolve(plan.running, num_output=(len(request.output),))
            plan = evolve(plan, running=running)
            futures.append((plan, bench.executor.execute_model(plan, non_block=True)))
            request.computed += 1
            request.tokens.append(-1)
            if len(futures) > 1:
                self._settle(request, *futures.pop(0))
        while futures:
            self._settle(request, *futures.pop(0))
        bench.check_greedy(request, "with two steps in flight")

    @staticmethod
    def _settle(request: Any, plan: Any, future: Future[Any]) -> None:
        output = future.result(60)
        place = len(request.prompt) + plan.running.num_output[0]
        request.tokens[place] = output.tokens[0][0]

    @own_workers
    @needs(Capability.GRAPHS)
    def test_graphs_change_no_answer(self) -> None:
        """Recorded and replayed, padded as the platform likes."""
        most = self.bench.most_seqs
        bench = self.other(graph_mode="full_decode_only", graph_sizes=tuple({1, 2, 4, most}))
        for count in sorted({max(1, most - 1), most}):
            requests = [bench.steps.add(prompt) for prompt in bench.prompts(count, seed=8)]
            bench.steps.run(8)
            for request in requests:
                bench.check_greedy(request, f"with graphs, {count} requests at once")
            bench.steps.finish(*requests)

    @own_workers
    @needs(Capability.SPECULATIVE)
    def test_drafts_change_no_answer(self) -> None:
        """Right drafts are taken, wrong ones are rolled back."""
        bench = self.other(num_speculative_tokens=2)
        for wrong in (False, True):
            request = bench.steps.add(PROMPT)
            bench.steps.run(1)
            while len(request.output) < 8:
                right = bench.oracle_tokens(request, 2)
                drafts = (
                    tuple((token + 1) % bench.vocab_size for token in right) if wrong else right
                )
                bench.steps.step({request.req_id: 3}, drafts={request.req_id: drafts})
            bench.check_greedy(request, f"with {'wrong' if wrong else 'right'} drafts")
            bench.steps.finish(request)

    @own_workers
    @needs(Capability.LOGITS_PROCESSORS)
    def test_a_processor_changes_the_logits_before_the_choice(self) -> None:
        """Named by the configuration, built in the worker."""
        bench = self.other(logits_processors=("hardpoint_conformance.processors:EvenOnly",))
        output = bench.steps.alone(PROMPT, 8).output
        expect(
            all(token % 2 == 0 for token in output),
            "a logits processor forbids what it sets to minus infinity",
            seen=f"odd ids in {output}, though the processor forbids them",
            where=Worker.execute_model, do="Apply config.sampling.logits_processors in order.",
        )  # fmt: skip

    @needs(Capability.DATA_PARALLEL)
    def test_an_inert_batch_touches_nothing(self) -> None:
        """``execute_dummy_batch`` between two steps."""
        bench = self.bench
        request = bench.steps.add(PROMPT)
        bench.steps.run(3)
        bench.executor.execute_dummy_batch()
        bench.steps.run(8)
        bench.check_greedy(request, "after an inert batch")

    @needs(Capability.MULTIMODAL)
    def test_caches_of_inputs_can_be_reset(self) -> None:
        """Between steps, without an effect on what runs."""
        bench = self.bench
        request = bench.steps.add(PROMPT)
        bench.steps.run(3)
        bench.executor.reset_mm_cache()
        bench.executor.reset_encoder_cache()
        bench.steps.run(6)
        bench.check_greedy(request, "after the caches of inputs were reset")

    @own_workers
    @needs(Capability.TENSOR_PARALLEL)
    def test_two_that_share_each_layer_give_the_same_answer(self) -> None:
        """``tensor_parallel_size = 2``."""
        self._spread(Capability.TENSOR_PARALLEL, tensor_parallel_size=2)

    @own_workers
    @needs(Capability.PIPELINE_PARALLEL)
    def test_two_stages_give_the_same_answer(self) -> None:
        """``pipeline_parallel_size = 2``."""
        self._spread(Capability.PIPELINE_PARALLEL, pipeline_parallel_size=2)

    def _spread(self, capability: Capability, **sizes: int) -> None:
        """Run over two shards; what this executor or machine cannot do is not applicable."""
        self.subject.release()
        try:
            prepared = self.subject.prepare_spread(**sizes)
            if prepared is None:
                not_applicable("no executor for several workers is installed")
            executor = self.subject.started(prepared)
        except (ConfigError, RemoteError) as error:
            cause = error.__cause__ if isinstance(error, RemoteError) else error
            told = isinstance(cause, ConfigError) and next(iter(sizes)) in str(cause)
            if not told or not self.supports(capability):
                raise
            not_applicable(f"not with this executor, or on this machine: {cause}")
        bench = Bench(self.subject, executor)
        requests = [bench.steps.add(prompt) for prompt in bench.prompts(bench.most_seqs, seed=6)]
        bench.steps.run(6)
        for request in requests:
            bench.check_greedy(request, f"with {sizes}")

    @own_workers
    @needs(Capability.SHARDED_STATE)
    def test_saved_shards_load_as_the_same_model(self) -> None:
        """What ``save_sharded_state`` wrote is what ``load_format = "sharded_state"`` reads."""
        bench = self.bench
        folder = self.subject.scratch("shards")
        wanted = bench.steps.alone(PROMPT, 6).output
        source = Path(bench.description.path)
        for each in source.glob("*.json"):
            (folder / each.name).write_bytes(each.read_bytes())
        files = bench.executor.save_sharded_state(str(folder))
        expect(
            all((saved.num_bytes, saved.sha256) == _size_and_digest(folder / saved.name)
                for rank in files for saved in rank),
            "the files that are reported are those that were written", seen=files,
            where=Worker.save_sharded_state, do="Report names, sizes and digests of the files.",
        )  # fmt: skip
        if self.subject.probe.loads_shards:
            other = self.other(model=str(folder), load_format="sharded_state")
            expect_equal(
                other.steps.alone(PROMPT, 6).output, wanted, "saved shards load as the same model",
                where=Worker.save_sharded_state, do="Save what is loaded, under the same names.",
            )  # fmt: skip


def _size_and_digest(path: Path) -> tuple[int, str]:
    data = path.read_bytes()
    return len(data), hashlib.sha256(data).hexdigest()
