"""Model runners that report wrongly in one way each: the dummy's, an output changed."""

from __future__ import annotations

from attrs import evolve
from broken_runners import Runner
from mutation import broken


@broken(
    "a log-probability is that of the token after", "test_a_row_of_scores_is_laid_out_as_written"
)
class LogprobsOffByOne(Runner):
    def change(self, output, step):
        def shifted(row):
            return evolve(row, values=tuple((*v[1:], v[0]) for v in row.values))

        return evolve(output, logprobs={k: shifted(v) for k, v in output.logprobs.items()})


@broken("ranks count from 0", "test_a_row_of_scores_is_laid_out_as_written")
class RanksFromZero(Runner):
    def change(self, output, step):
        def lower(row):
            ranks = tuple(tuple(rank - 1 for rank in each) for each in row.ranks)
            return evolve(row, ranks=ranks)

        return evolve(output, logprobs={k: lower(v) for k, v in output.logprobs.items()})


@broken("all who ask get as many as the first asked for", "test_only_those_who_ask_get_scores")
class ScoresAsTheFirst(Runner):
    def change(self, output, step):
        if not output.logprobs:
            return output
        count = next(iter(output.logprobs.values())).num_best

        def cut(row):
            cells = {name: getattr(row, name) for name in ("ids", "values", "ranks")}
            short = {name: tuple(v[: 1 + count] for v in rows) for name, rows in cells.items()}
            return evolve(row, num_best=min(count, row.num_best), **short)

        return evolve(output, logprobs={k: cut(row) for k, row in output.logprobs.items()})


@broken("log-probabilities go to requests that did not ask", "test_only_those_who_ask_get_scores")
class ScoresForAll(Runner):
    def change(self, output, step):
        found = next(iter(output.logprobs.values()), None)
        if found is None:
            return output
        given = {req_id: output.logprobs.get(req_id, found) for req_id in output.req_ids}
        return evolve(output, logprobs=given)


@broken(
    "prompt log-probabilities are of one token later",
    "test_a_prompt_is_scored_token_by_token",
)
class PromptScoresShifted(Runner):
    def change(self, output, step):
        def later(row):
            turned = {name: getattr(row, name) for name in ("ids", "values", "ranks")}
            return evolve(row, **{name: (*v[1:], v[0]) for name, v in turned.items()})

        scored = {req_id: later(row) for req_id, row in output.prompt_logprobs.items()}
        return evolve(output, prompt_logprobs=scored)


@broken(
    "the value of the prompt's own token is that of the one before",
    "test_a_prompt_is_scored_token_by_token",
)
class PromptTokensValueShifted(Runner):
    def change(self, output, step):
        def shifted(row):
            own = [values[0] for values in row.values]
            rows = zip(own[-1:] + own[:-1], row.values, strict=True)
            return evolve(row, values=tuple((first, *rest[1:]) for first, rest in rows))

        scored = {req_id: shifted(row) for req_id, row in output.prompt_logprobs.items()}
        return evolve(output, prompt_logprobs=scored)


@broken(
    "the rows of an output are in another order than its ids", "test_a_full_batch_is_its_requests"
)
class RowsReversed(Runner):
    def change(self, output, step):
        alike = len({len(row) for row in output.tokens}) == 1
        return evolve(output, tokens=output.tokens[::-1]) if alike else output


@broken(
    "a request that was scheduled is left out of the output",
    "test_the_output_names_the_scheduled_requests_each_once",
)
class LeftOut(Runner):
    def change(self, output, step):
        if len(output.req_ids) > 2:
            return evolve(output, req_ids=output.req_ids[1:], tokens=output.tokens[1:])
        return output


@broken("every vector is the same", "test_a_vector_is_the_prompts_own")
class VectorOfNothing(Runner):
    def change(self, output, step):
        return evolve(output, pooled={k: (0.5,) * len(v) for k, v in output.pooled.items()})


@broken("a vector is that of the whole batch", "test_a_vector_is_the_prompts_own")
class VectorOfAnother(Runner):
    def change(self, output, step):
        spoilt = {k: tuple(x + len(step.num_tokens) for x in v) for k, v in output.pooled.items()}
        return evolve(output, pooled=spoilt)


@broken(
    "a plan that names a record of another plugin is refused", "test_records_of_others_pass_through"
)
class ForeignRecordsRefused(Runner):
    def execute_model(self, scheduler_output):
        foreign = [*scheduler_output.extra, *(k for new in scheduler_output.new for k in new.extra)]
        if foreign:
            raise KeyError(foreign[0])
        return super().execute_model(scheduler_output)


@broken("a step of nothing raises", "test_a_step_of_nothing_is_an_empty_output")
class NothingRaises(Runner):
    def execute_model(self, scheduler_output):
        if not scheduler_output.total_tokens:
            raise ValueError("empty batch")
        return super().execute_model(scheduler_output)


# Two phases, grammars, drafts.


@broken("a grammar's mask is ignored", "test_a_mask_binds_its_request_alone")
class MaskIgnored(Runner):
    def sample_tokens(self, ticket, grammar):
        return super().sample_tokens(ticket, None)


@broken("a mask binds the row of its own number", "test_a_mask_binds_its_request_alone")
class MaskByRow(Runner):
    def sample_tokens(self, ticket, grammar):
        order = self._waiting[ticket.step_id].order
        if grammar is not None:
            ids = tuple(state.req_id for state in order[: len(grammar.req_ids)])
            grammar = evolve(grammar, req_ids=ids)
        return super().sample_tokens(ticket, grammar)


@broken("a deferred step has no scores", "test_a_deferred_step_chooses_what_an_immediate_one_does")
class DeferredUnscored(Runner):
    def sample_tokens(self, ticket, grammar):
        return evolve(super().sample_tokens(ticket, grammar), logprobs={})


@broken("a grammar's mask binds every request of the step", "test_a_mask_binds_its_request_alone")
class MaskForAll(Runner):
    def sample_tokens(self, ticket, grammar):
        computed = self._waiting[ticket.step_id]
        if grammar is not None and grammar.req_ids:
            ids = tuple(state.req_id for state in computed.order)
            grammar = evolve(grammar, req_ids=ids, masks=(grammar.masks[0],) * len(ids))
        return super().sample_tokens(ticket, grammar)


@broken("one draft too many is accepted", "test_drafts_change_no_answer")
class AcceptsEveryDraft(Runner):
    def change(self, output, step):
        return evolve(output, tokens=tuple(map(self._more, output.req_ids, output.tokens)))

    def _sample(self, computed, grammar):
        self._given = computed.step.drafts
        return super()._sample(computed, grammar)

    def _more(self, req_id, row):
        drafts = self._given.get(req_id, ())
        if not 0 < len(row) <= len(drafts):
            return row
        wrong = drafts[len(row) - 1]
        self.requests[req_id].tokens.insert(-1, wrong)
        return (*row[:-1], wrong, row[-1])


@broken(
    "a soft prompt is given to every request", "test_a_soft_prompt_is_of_the_requests_that_name_it"
)
class SoftPromptForAll(Runner):
    def _replaced(self, state):
        loaded = sorted(self.prompt_adapters.ids())
        if loaded and state.prompt_adapter is None:
            state.prompt_adapter = self.prompt_adapters.use(loaded[0])
        return super()._replaced(state)


@broken("warming up changes the weights", "test_greedy_ids_are_the_oracles")
class WarmUpSpoils(Runner):
    def warm_up(self):
        report = super().warm_up()
        self.get_model().weights ^= 1
        return report
