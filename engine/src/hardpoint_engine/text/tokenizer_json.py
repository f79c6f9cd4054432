"""The tokenizer of a Hugging Face folder: ``tokenizer.json``, with ``tokenizer_config.json``,
``chat_template.jinja`` and ``additional_chat_templates/tool_use.jinja`` beside it. Nothing else of
the folder is read, and no code is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoints.files import contained, read_whole
from hardpoint.errors import CheckpointError

from hardpoint_engine.text.vocabulary import Vocabulary, checked

if TYPE_CHECKING:
    import tokenizers

MOST_VOCABULARY_BYTES = 256 << 20
MOST_TEXT_BYTES = 4 << 20
"""Larger files are refused unread: no known tokenizer is a tenth of that."""
MOST_PART_BYTES = 8 << 20
LONGEST_PUT_IN = 1 << 12
NOT_PUT_IN = ("precompiled_charsmap",)
"""Tables that are data of a part, not text."""


def read_json_tokenizer(source: Path) -> Vocabulary:
    """Read the folder ``source``, or the folder of the ``tokenizer.json`` that it is.

    Raises CheckpointError naming the file.
    """
    folder, name = (source, "tokenizer.json") if source.is_dir() else (source.parent, source.name)
    from tokenizers import Tokenizer

    path = contained(folder, name)
    data = read_whole(path, MOST_VOCABULARY_BYTES)
    tokenizer = checked(
        f"{path} is not a tokenizer that can be read",
        lambda: Tokenizer.from_buffer(data),
    )
    _check_parts(path, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _settings(folder)
    default, with_tools = _templates(folder, settings)
    return Vocabulary(
        tokenizer,
        chat_template=default,
        tool_template=with_tools,
        template_values=_values(settings),
    )


def _check_parts(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Refuse what would blow up texts: parts that are huge, or that put in long texts."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part: Any = getattr(tokenizer, name)
        if part is None:
            continue
        state = part.__getstate__()  # its JSON: the one way to read a part's settings
        longest = MOST_PART_BYTES + 1
        if len(state) <= MOST_PART_BYTES:
            longest = _longest_put_in(json.loads(state))
        if longest > LONGEST_PUT_IN:
            raise CheckpointError(
                f"{path}: its {name} holds {longest} characters or more to be put into texts; at "
                f"most {LONGEST_PUT_IN} are accepted: no known tokenizer has as many"
            )


def _longest_put_in(state: Any) -> int:
    """Return the length of the longest text, or list of steps, in a part's settings."""
    if isinstance(state, dict):
        kept = (value for key, value in state.items() if key not in NOT_PUT_IN)
        return max(map(_longest_put_in, kept), default=0)
    if isinstance(state, list):
        return max(len(state), *map(_longest_put_in, state), 0)
    return len(state) if isinstance(state, str) else 0


def _text(path: Path) -> str:
    try:
        return read_whole(path, MOST_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


def _optional(folder: Path, name: str) -> str | None:
    """Return the text of ``name``, or None where the folder has no such entry."""
    if not (folder / name).exists() and not (folder / name).is_symlink():
        return None
    return _text(contained(folder, name))


def _settings(folder: Path) -> Mapping[str, Any]:
    text = _optional(folder, "tokenizer_config.json")
    if text is None:
        return {}
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} must hold a table, not {type(settings).__name__}")
    return settings


def _templates(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the template, and the one for conversations with tools, where that is another.

    Those of files, if there is a ``chat_template.jinja``, else those of the settings.
    """
    if (own := _optional(folder, "chat_template.jinja")) is not None:
        return own, _optional(folder, "additional_chat_templates/tool_use.jinja")
    given = settings.get("chat_template")
    if not isinstance(given, list):
        return (given if isinstance(given, str) else None), None
    named = {
        entry["name"]: entry["template"]
        for entry in given
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    return named.get("default"), named.get("tool_use")


def _values(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return every ``..._token`` of the settings as text; a token may be written as a table."""
    values = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                values[key] = text
    return values
