"""Model runners that choose or report wrongly in one way each: the dummy's, a part replaced."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve
from broken_runners import Runner
from hardpoint_dummy import rows
from hardpoint_dummy.model import mix
from hardpoint_dummy.requests import RequestTable
from mutation import broken

# The choice.


def _spoilt(name, function):
    """A runner whose rows choose by ``function(original, ...)`` in place of a sampling function."""
    original = getattr(rows, name)

    class Spoilt(Runner):
        def _sample(self, computed, grammar):
            def replaced(*args, **kwargs):
                return function(original, *args, **kwargs)

            setattr(rows, name, replaced)
            try:
                return super()._sample(computed, grammar)
            finally:
                setattr(rows, name, original)

    return Spoilt


def _with_params(**changes):
    """Choose by parameters that are not the request's: name -> function of its params."""

    def choose(original, model, state, params, context):
        keys = {name: change(params) for name, change in changes.items()}
        return original(model, state, evolve(params, **keys), context)

    return _spoilt("choose", choose)


@broken(
    "a seed is ignored",
    "test_draws_follow_their_distribution[temperature]",
    "test_other_seeds_give_other_answers",
)
class SeedIgnored(_with_params(seed=lambda params: 1)):
    pass


@broken("top_k keeps one too many", "test_draws_follow_their_distribution[top_k]")
class TopKOffByOne(_with_params(top_k=lambda params: params.top_k + (params.top_k > 0))):
    pass


@broken("top_p is ignored", "test_draws_follow_their_distribution[top_p]")
class TopPIgnored(_with_params(top_p=lambda params: 1.0)):
    pass


def _top_p_first(original, model, state, params, context):
    nucleus = rows.processed(model, state, evolve(params, top_k=0, min_p=0.0), context)
    kept = tuple(token for token, logit in enumerate(nucleus) if logit > float("-inf"))
    if params.top_p < 1:
        params = evolve(params, top_p=1.0, allowed_token_ids=kept)
    return original(model, state, params, context)


@broken("top_p cuts before top_k", "test_draws_follow_their_distribution[top_k, then top_p]")
class TopPFirst(_spoilt("choose", _top_p_first)):
    pass


@broken("min_p is ignored", "test_draws_follow_their_distribution[min_p]")
class MinPIgnored(_with_params(min_p=lambda params: 0.0)):
    pass


@broken("the temperature is ignored", "test_draws_follow_their_distribution[temperature]")
class TemperatureIgnored(
    _with_params(
        temperature=lambda params: 1.0 if params.temperature > 0.01 else params.temperature
    )
):
    pass


PARAMETER = "test_a_parameter_changes_the_choice_as_the_rules_say"


@broken("frequency_penalty is taken as a presence_penalty", f"{PARAMETER}[frequency_penalty]")
class FrequencyAsPresence(
    _with_params(
        presence_penalty=lambda params: params.presence_penalty + params.frequency_penalty,
        frequency_penalty=lambda params: 0.0,
    )
):
    pass


class _CountsFromResumption(RequestTable):
    since: ClassVar[dict] = {}

    def _update(self, running):
        for req_id in running.resumed:
            self.since[tuple(self[req_id].prompt)] = len(self[req_id].output)
        return super()._update(running)


def _since_resumption(original, model, state, params, context):
    first = _CountsFromResumption.since.get(tuple(context.prompt), 0)
    return original(model, state, params, evolve(context, output=context.output[first:]))


@broken(
    "penalties count only what was chosen since a request was resumed",
    "test_penalties_count_what_was_chosen_before_a_request_was_computed_anew",
)
class PenaltiesForget(_spoilt("choose", _since_resumption)):
    table_class = _CountsFromResumption


@broken("presence_penalty is ignored", f"{PARAMETER}[presence_penalty]")
class PresenceIgnored(_with_params(presence_penalty=lambda params: 0.0)):
    pass


@broken("repetition_penalty is ignored", f"{PARAMETER}[repetition_penalty]")
class RepetitionIgnored(_with_params(repetition_penalty=lambda params: 1.0)):
    pass


@broken(
    "logit_bias is ignored",
    "test_a_parameter_changes_the_choice_as_the_rules_say[logit_bias]",
)
class BiasIgnored(_with_params(logit_bias=lambda params: None)):
    pass


@broken(
    "allowed_token_ids is ignored",
    "test_a_parameter_changes_the_choice_as_the_rules_say[allowed_token_ids]",
)
class AllowedIgnored(_with_params(allowed_token_ids=lambda params: None)):
    pass


@broken(
    "min_tokens counts one too few",
    "test_a_parameter_changes_the_choice_as_the_rules_say[min_tokens]",
)
class MinTokensOffByOne(_with_params(min_tokens=lambda params: max(0, params.min_tokens - 1))):
    pass


def _by_step(original, model, state, params, context):
    _by_step.count = getattr(_by_step, "count", 0) + 1
    return original(model, state, evolve(params, seed=mix(_by_step.count)), context)


@broken(
    "one generator draws for all rows, one after the other",
    "test_a_seed_gives_the_same_answer_whoever_is_beside",
)
class SharedGenerator(_spoilt("choose", _by_step)):
    pass


def _position_0(original, model, state, params, context):
    return original(model, state, params, evolve(context, output=context.output[:0]))


@broken("every position of an answer is drawn alike", "test_each_position_draws_anew")
class DrawsOnce(_spoilt("choose", _position_0)):
    pass


# What is said of it.


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
            return evolve(row, ranks=tuple(rank - 1 for rank in row.ranks))

        return evolve(output, logprobs={k: lower(v) for k, v in output.logprobs.items()})


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
        return evolve(output, tokens=output.tokens[::-1])


@broken(
    "a request that was scheduled is left out of the output",
    "test_the_output_names_the_scheduled_requests_each_once",
)
class LeftOut(Runner):
    def change(self, output, step):
        if len(output.req_ids) > 2:
            return evolve(output, req_ids=output.req_ids[1:], tokens=output.tokens[1:])
        return output


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
        tokens = tuple(
            (*row[:-1], step.drafts[req_id][len(row) - 1], *row[-1:])
            if 0 < len(row) <= len(step.drafts.get(req_id, ())) else row
            for req_id, row in zip(output.req_ids, output.tokens, strict=True)
        )  # fmt: skip
        return evolve(output, tokens=tokens)


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
