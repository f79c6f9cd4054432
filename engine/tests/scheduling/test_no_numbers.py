"""Requests without a token to choose: whom the error blames, and whether the cache is believed."""

from __future__ import annotations

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint.messages import ModelRunnerOutput
from hardpoint_engine.scheduling.results import NoNumbersError

WISH = {"allowed_token_ids": (3, 4)}


@pytest.mark.parametrize(
    ("wrong", "wishes", "processors", "kind", "named"),
    [
        (5, {}, (), NoNumbersError, r"5 are NaN or infinite\): .* cache are corrupt; reload"),
        (5, WISH, (), NoNumbersError, "5 are NaN"),
        (5, {}, ("Bans",), NoNumbersError, "corrupt or logits processor Bans; reload"),
        (0, {}, (), NoNumbersError, "all are -infinite"),
        (0, WISH, (), InvalidRequestError, r"\(allowed_token_ids\) leaves none"),
        (
            0,
            {},
            ("Bans", "More"),
            InvalidRequestError,
            r"\(logits processor Bans, logits .* More\)",
        ),
        (0, WISH, ("Bans",), InvalidRequestError, r"\(allowed_token_ids, logits processor Bans\)"),
    ],
)
def test_what_is_blamed(fakes, wrong, wishes, processors, kind, named):
    driver = fakes.Driver(processors=processors)
    driver.add("neighbour", range(9), max_tokens=1)
    driver.run()
    driver.add("a", range(20, 29), **wishes)
    plan = driver.scheduler.schedule()
    output = ModelRunnerOutput(
        step_id=plan.step_id, req_ids=("a",), tokens=((0,),), nan_counts={"a": wrong}
    )
    (ended,) = driver.scheduler.commit(plan, output)
    assert (ended.finish_reason, ended.new_tokens) == ("error", ())
    assert isinstance(ended.error, kind)
    with pytest.raises(kind, match=named):
        raise ended.error
    driver.add("again", range(9), max_tokens=1)
    again = driver.scheduler.schedule().new[0]
    assert (again.num_computed > 0) == (kind is InvalidRequestError)
