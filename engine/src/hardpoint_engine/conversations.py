"""Conversations as callers hand them in, checked and in one shape. Driver side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hardpoint.errors import InvalidRequestError
from hardpoint.suggestions import did_you_mean

from hardpoint_engine.prompts import empty, is_list, numbered

Messages = Sequence[Mapping[str, Any]]
"""A conversation."""


class ChatOptions(TypedDict, total=False):
    """The keywords of every method that takes conversations.

    ``system`` is put before them as a system message. ``tools`` (their descriptions, plain data)
    and ``chat_template_kwargs`` reach the template by their names, and so does
    ``add_generation_prompt`` (default True). ``chat_template`` is used instead of the model's own.
    """

    system: str | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool


NAMES = (*ChatOptions.__annotations__,)
OF_TEMPLATE = ("tools", "add_generation_prompt")
"""Those of the options that reach the template by their names."""


def check_options(options: Mapping[str, object]) -> None:
    """Raise TypeError for a keyword that is none, as Python does."""
    for name in options:
        if name not in NAMES:
            hint = did_you_mean(name, NAMES) or f"There are {', '.join(NAMES)}."
            raise TypeError(f"a conversation has no keyword {name!r}. {hint}")


def template_values(options: ChatOptions) -> dict[str, Any]:
    """Return all values for a chat template. Raises InvalidRequestError where
    ``chat_template_kwargs`` has one that is given in another way.
    """
    more = options.get("chat_template_kwargs") or {}
    for name in (*OF_TEMPLATE, "messages"):
        if name in more:
            raise InvalidRequestError(
                f"chat_template_kwargs has {name!r}, which is an argument of its own",
                field="chat_template_kwargs",
                value=more[name],
            )
    given = {"tools": options.get("tools")}
    return {**more, **given, "add_generation_prompt": options.get("add_generation_prompt", True)}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError for a conversation without a word, before any template is asked."""
    if isinstance(messages, str | bytes | Mapping) or not is_list(messages):
        raise InvalidRequestError(
            f'messages must be a list of {{"role": "user", "content": "..."}}, not {messages!r}',
            field="messages",
            value=messages,
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f'each message must be {{"role": ..., "content": ...}}, not {message!r}',
                field="messages",
                value=message,
            )
    content = messages[-1].get("content") if len(messages) else None
    if content is None or (isinstance(content, str) and not content.strip()):
        raise empty(content)


def as_conversations(
    messages: Messages | Sequence[Messages], system: str | None = None, *, one: bool = False
) -> list[Messages]:
    """Return one conversation, or several, as a list, each begun by ``system`` if that is given.

    Raises InvalidRequestError where a conversation has a system message of its own, too.
    """
    single = one or is_conversation(messages)
    conversations: list[Any] = [messages] if single else list(messages)
    if system is None:
        return conversations
    for index, conversation in enumerate(conversations):
        check_messages(conversation)
        if conversation[0]["role"] == "system":
            error = InvalidRequestError(
                "the conversation begins with a system message, and system is given, too; leave "
                "one of them out",
                field="system",
                value=system,
            )
            raise numbered(error, index, len(conversations))
    first = {"role": "system", "content": system}
    return [[first, *conversation] for conversation in conversations]


def is_conversation(messages: Sequence[Any]) -> bool:
    """Whether ``messages`` is one conversation, or nothing like it, and not a list of them."""
    if isinstance(messages, str | bytes | Mapping) or not is_list(messages):
        return True
    return not messages or isinstance(messages[0], Mapping)
