"""What one step says of each sampled request: tokens, logprobs, drafts, unwritten cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.logprob_rows import joined
from hardpoint.messages import GrammarOutput, Logprobs, SchedulerOutput

from hardpoint_dummy.drafting import propose
from hardpoint_dummy.requests import RequestState
from hardpoint_dummy.sampling import Context, choose, logprob_row, processed

if TYPE_CHECKING:
    from hardpoint_dummy.model_runner import DummyModelRunner

NO_CHOICE = 0
"""The token of a request that has nothing to choose from."""


class RowSampler:
    """Samples the requests of one step and gathers what goes into its output beside the tokens."""

    def __init__(
        self, runner: DummyModelRunner, step: SchedulerOutput, grammar: GrammarOutput | None
    ) -> None:
        self._runner = runner
        self._model = runner.get_model()
        self._step = step
        description = runner.config.description
        self._end_ids = frozenset(description.eos_token_ids) if description else frozenset()
        self._masks: dict[str, tuple[bytes, ...]] = (
            dict(zip(grammar.req_ids, grammar.masks, strict=True)) if grammar else {}
        )
        source, _, kind = runner.config.sampling.logprobs_mode.partition("_")
        self._processed, self._normalised = source == "processed", kind == "logprobs"
        self._most_drafts = runner.config.speculative.num_speculative_tokens
        self.logprobs: dict[str, Logprobs] = {}
        self.prompt_logprobs: dict[str, Logprobs] = {}
        self.pooled: dict[str, tuple[float, ...]] = {}
        self.drafts: dict[str, tuple[int, ...]] = {}
        self.unwritten: dict[str, int] = {}
        """Request -> how many cells it read that nobody had written (a real device's NaNs); 0 where
        its parameters left no token to choose from.
        """

    def sample(self, state: RequestState) -> tuple[int, ...]:
        """Choose the next tokens of one request: one, and one more for each accepted draft."""
        self._score_prompt(state)
        if state.extra.pooling or state.pooling is not None:
            self.pooled[state.req_id] = self._model.pooled(self._read(state, len(state.tokens)))
            return ()
        drafts = self._step.drafts.get(state.req_id, ())
        masks = self._masks.get(state.req_id, ())
        chosen: list[int] = []
        rows: list[Logprobs] = []
        for index in range(len(drafts) + 1):
            reading = self._read(state, len(state.tokens))
            mask = masks[index] if index < len(masks) else None
            context = Context(
                prompt=state.prompt, output=state.output, end_ids=self._end_ids, mask=mask
            )
            token = choose(self._model, reading, state.sampling, context)
            if token is None:
                self.unwritten.setdefault(state.req_id, 0)
                token = NO_CHOICE
            rows += self._score(state, reading, token, context)
            chosen.append(token)
            state.tokens.append(token)
            if index < len(drafts) and drafts[index] != token:
                break
        if rows:
            self.logprobs[state.req_id] = joined(rows)
        self._propose(state)
        return tuple(chosen)

    def _read(self, state: RequestState, length: int) -> int:
        cells = self._runner.cache.contents(state.blocks, length)
        unwritten = sum(group.count(0) for group in cells)
        if unwritten:
            self.unwritten[state.req_id] = unwritten
        return self._model.state(cells)

    def _score(
        self, state: RequestState, reading: int, token: int, context: Context
    ) -> list[Logprobs]:
        params = state.sampling
        if params.logprobs is None and params.logprob_token_ids is None:
            return []
        logits = (
            processed(self._model, reading, params, context)
            if self._processed
            else self._model.logits(reading)
        )
        listed = params.logprob_token_ids or ()
        count = params.logprobs or 0
        return [logprob_row(logits, token, count, listed, normalised=self._normalised)]

    def _score_prompt(self, state: RequestState) -> None:
        count = state.sampling.prompt_logprobs
        if count is None or state.prompt_scored:
            return
        state.prompt_scored = True
        prompt = state.prompt
        rows = [
            logprob_row(
                self._model.logits(self._read(state, length)),
                prompt[length],
                count,
                normalised=self._normalised,
            )
            for length in range(1, len(prompt))
        ]
        self.prompt_logprobs[state.req_id] = joined(rows)

    def _propose(self, state: RequestState) -> None:
        if not self._most_drafts:
            return
        cells = self._runner.cache.contents(state.blocks, len(state.tokens) - 1)
        self.drafts[state.req_id] = propose(
            self._model, cells, state.tokens[-1], self._runner.salt(state), self._most_drafts
        )
