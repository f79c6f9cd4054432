"""A logits processor of a module that workers can import."""

from __future__ import annotations

from hardpoint.errors import InvalidRequestError
from hardpoint.logits_processor import LogitsProcessor


class NoThirteen(LogitsProcessor):
    """Bans id 13, and the id that a request names."""

    @classmethod
    def check(cls, sampling):
        if type(sampling.extra_args.get("ban", 0)) is not int:
            raise InvalidRequestError("ban must be an id", field="extra_args", value=None)

    def apply(self, logits, rows):
        logits[:, 13] = float("-inf")
        for row in range(len(rows.slots)):
            wish = (rows.sampling(row).extra_args or {}).get("ban")
            if wish is not None:
                logits[row, wish] = float("-inf")
