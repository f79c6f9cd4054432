"""What is accepted, refused or within the limits, and what then happens."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.platform import Platform, RequestView
from hardpoint.records import Limits, Problem
from hardpoint.sampling_params import SamplingParams

from hardpoint_conformance.contract import expect, expect_equal, expect_raises
from hardpoint_conformance.generation import Bench
from hardpoint_conformance.kit_model import ModelShape
from hardpoint_conformance.model_runner.draws import PARAMETERS
from hardpoint_conformance.platform.part import PlatformPart
from hardpoint_conformance.steps import GREEDY
from hardpoint_conformance.subject import BLOCKS, MODEL_LENGTH
from hardpoint_conformance.suite import not_applicable, own_workers


class PromiseTests(PlatformPart):
    """check, check_request and limits against what then happens."""

    @own_workers
    def test_a_configuration_that_check_accepts_runs(self) -> None:
        """Empty problems, and the workers start."""
        prepared = self.subject.prepare()
        problems = tuple(prepared.platform.check(prepared.config))
        expect(
            not problems, "the kit's own small configuration is accepted",
            seen="; ".join(map(str, problems)), where=Platform.check,
            do="Refuse in check only what cannot run.",
        )  # fmt: skip
        bench = Bench(self.subject, self.subject.started(prepared))
        bench.check_greedy(bench.steps.alone((5, 9, 3), 4))
        self.subject.end(bench.executor)

    @own_workers
    def test_every_data_type_that_it_offers_runs(self) -> None:
        """And gives what the oracle gives, within the type's tolerance."""
        for dtype in self.limits().dtypes:
            self._runs(dtype=dtype)

    @own_workers
    def test_the_largest_and_the_smallest_block_size_run(self) -> None:
        """And the default. Of sizes of 64 tokens and more, the smallest is enough."""
        sizes = self.limits().block_sizes
        large = max((size for size in sizes if size < 64), default=min(sizes))
        for size in dict.fromkeys((min(sizes), sizes[0], large)):
            self._runs(block_size=size, max_model_len=min(MODEL_LENGTH, BLOCKS * size))

    @own_workers
    def test_the_largest_head_size_runs_and_so_do_tied_embeddings(self) -> None:
        """The kit's other models have the smallest, and an output matrix of their own."""
        shape = ModelShape.within(self.limits(), tied=True)
        largest = max(self.limits().head_sizes, default=2 * shape.head_size)
        self._runs(evolve(shape, head_size=largest))

    @pytest.mark.parametrize("key", ["dtype", "block_size", "max_num_seqs"])
    def test_what_is_beyond_the_limits_is_refused_before_anything_starts(self, key: str) -> None:
        """With a ConfigError that names the key."""
        limits = self.limits()
        values = {
            "dtype": next((d for d in ("float32", "bfloat16") if d not in limits.dtypes), None),
            "block_size": next(n for n in range(3, 999, 2) if n not in limits.block_sizes),
            "max_num_seqs": None if limits.max_num_seqs is None else limits.max_num_seqs + 1,
        }
        value = values[key]
        if value is None:
            not_applicable("its limits leave nothing out that could be asked for")
        error = expect_raises(
            ConfigError, lambda: self.subject.prepare(None, **{key: value}),
            "what the limits exclude is a ConfigError before any worker starts", where=Limits,
            do="Report the limits truly; the check against them is core's.",
        )  # fmt: skip
        expect(
            key in str(error), "the error names the configuration key", seen=str(error),
            where=Problem, do="Leave it to core, or name the key in your Problem.",
        )  # fmt: skip

    @own_workers
    def test_more_ranks_than_it_can_place_are_an_error_and_no_hang(self) -> None:
        """A size that fits neither the model nor the machine."""
        expect_raises(
            HardpointError,
            lambda: self.subject.prepare(None, tensor_parallel_size=7).start().shutdown(),
            "ranks that cannot be had are refused with a typed error", where=Platform.check,
            do="Return a Problem of tensor_parallel_size from check, or declare the capability "
            "NOT_YET.",
        )  # fmt: skip

    def test_what_is_declared_unsupported_is_refused_before_it_is_queued(self) -> None:
        """``unsupported_parameters``: name -> why."""
        platform = self.subject.platform()
        defaults = SamplingParams()
        for name, reason in platform.unsupported_parameters.items():
            expect(
                hasattr(defaults, name) and reason, "unsupported_parameters names sampling "
                "parameters and says why", seen=f"{name}: {reason!r}", where=Platform,
                do="Use the names of hardpoint.sampling_params.SamplingParams.",
            )  # fmt: skip
        plain = RequestView(req_id="kit", num_prompt_tokens=3, sampling=GREEDY)
        expect_equal(
            platform.check_request(plain), None, "a plain request is accepted",
            where=Platform.check_request, do="Refuse only what cannot be honoured.",
        )  # fmt: skip

    @pytest.mark.parametrize("parameter", PARAMETERS)
    def test_check_request_says_what_then_happens(self, parameter: str) -> None:
        """Accepted: it has its effect (the ModelRunner suite). Refused: with the key, unedited."""
        values: dict[str, Any] = {
            "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0,
            "logit_bias": {3: 1.0}, "allowed_token_ids": (3, 4), "min_tokens": 2,
            "stop_token_ids": (5,), "bad_word_ids": ((5,),),
        }  # fmt: skip
        sampling = evolve(GREEDY, **{parameter: values[parameter]})
        view = RequestView(req_id="kit", num_prompt_tokens=3, sampling=sampling)
        same = evolve(GREEDY, **{parameter: values[parameter]})
        problem = self.subject.platform().check_request(view)
        expect(
            view.sampling == same
            and (problem is None or _tells(problem)),
            "check_request returns None or a Problem with key and message, and edits nothing",
            seen=problem,
            where=Platform.check_request, do="Return Problem(key=..., value=..., message=...).",
        )  # fmt: skip

    def _runs(self, shape: ModelShape | None = None, **keys: object) -> None:
        bench = Bench(self.subject, self.subject.ready(shape, **keys))
        request = bench.steps.add((5, 9, 3, 77, 20))
        bench.steps.run(4)
        bench.check_greedy(request, f"with {shape or keys}")
        self.subject.end(bench.executor)


def _tells(problem: object) -> bool:
    return isinstance(problem, Problem) and bool(problem.key and problem.message)
