"""Messages to a prompt, by the model's own template, rendered in a process that can be killed.

Driver side. A process is started early (:meth:`ChatTemplate.start`), so that its start is hidden
behind the loading of weights, and serves until it is closed or had to be killed. A further one is
started where a rendering finds the others at work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError

from hardpoint_engine.text.template_pool import SilentProcessError, TemplatePool

TIME_LIMIT = 5.0
"""Seconds for one rendering."""
MOST_CHARACTERS = 4 << 20
"""Length of a rendered prompt; a million tokens have about as many."""
ESCAPED = 12
"""Bytes of JSON that one character may take: a surrogate pair, escaped."""

Message = Mapping[str, Any]


class ChatTemplateError(InvalidRequestError):
    """The model's chat template is absent, broken, hostile, or refuses these messages.

    What to do: pass ``--chat-template FILE`` (``chat_template=``), or continue plain text
    (``--raw``, ``generate``).
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class ChatTemplate:
    """The template of one model, and ``tool_source``, the one that is used where tools are given,
    if it has a further one. Thread-safe.
    """

    def __init__(
        self,
        source: str | None,
        values: Mapping[str, str],
        *,
        tool_source: str | None = None,
        time_limit: float = TIME_LIMIT,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._source = source
        self._tool_source = tool_source
        self._values = dict(values)
        self._most = most_characters
        self._pool = TemplatePool(time_limit, most_characters * ESCAPED)

    def start(self) -> None:
        """Start a process without waiting for it, if the model has a template at all."""
        if self._source is not None or self._tool_source is not None:
            self._pool.start()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        source: str | None = None,
        **values: Any,
    ) -> str:
        """Return the prompt for ``messages``, by ``source`` if the model's own template shall not
        be used; further ``values`` reach the template by their names.

        Raises ChatTemplateError.
        """
        if source is None:
            with_tools = self._tool_source if values.get("tools") else None
            source = self._source if with_tools is None else with_tools
        if source is None:
            raise ChatTemplateError(
                "the model has no chat template; give the text that it shall continue as it is "
                "(--raw, or LLM.generate), or a template (--chat-template, or chat_template=)"
            )
        own = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        order = {
            "source": source,
            "values": {**self._values, **values, **own},
            "most_characters": self._most,
        }
        try:
            line = json.dumps(order).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"messages must be plain data: {error}") from None
        try:
            return self._text(self._pool.ask(line))
        except SilentProcessError as error:
            raise ChatTemplateError(f"the model's chat template {error}") from None

    def close(self) -> None:
        """End the processes. Idempotent; a later rendering starts a new one."""
        self._pool.close()

    def _text(self, result: Mapping[str, object]) -> str:
        if "refused" in result:
            raise ChatTemplateError(
                f"the model's chat template refuses the messages: {result['refused']}"
            )
        text = result.get("text")
        if not isinstance(text, str):
            raise ChatTemplateError(
                f"the model's chat template cannot be rendered: {result.get('error')}; "
                "go without it (--raw, or LLM.generate), or mend it"
            )
        return text
