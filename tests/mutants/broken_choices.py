"""Model runners that choose wrongly in one way each: the dummy's, a sampling function replaced."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve
from broken_runners import Runner
from hardpoint_dummy import rows
from hardpoint_dummy.model import mix
from hardpoint_dummy.requests import RequestTable
from mutation import broken


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
