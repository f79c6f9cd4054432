"""What a conversation keeps, and what it leaves out when it outgrows the model."""

from __future__ import annotations

import pytest
from hardpoint.errors import InvalidRequestError
from hardpoint_engine.cli.conversation import Conversation
from hardpoint_engine.text.chat_template import ChatTemplateError


def by_characters(messages) -> list[int]:
    return [ord(letter) for message in messages for letter in message["content"]]


def text(ids) -> str:
    return "".join(map(chr, ids))


@pytest.fixture
def conversation() -> Conversation:
    made = Conversation(by_characters, length=40, max_tokens=None, system="S")
    for number in range(3):
        made.answered(f"q{number}", f"a{number}")
    return made


def test_all_turns_are_told_in_order(conversation):
    roles = [message["role"] for message in conversation.messages("q3")]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]
    assert text(conversation.ask("q3")[0]) == "Sq0a0q1a1q2a2q3"
    conversation.reset()
    assert text(conversation.ask("q")[0]) == "Sq"


def test_the_oldest_turns_make_room_and_the_system_message_stays(conversation):
    ids, dropped = conversation.ask("x" * 22)  # 30 tokens beside 10 for the answer: two turns go
    assert (text(ids), dropped) == ("Sq2a2" + "x" * 22, 2)
    assert len(conversation) == 1
    assert conversation.ask("y")[1] == 0


def test_room_is_no_more_than_the_answer_takes():
    made = Conversation(by_characters, length=40, max_tokens=2)
    assert len(made.ask("x" * 38)[0]) == 38
    with pytest.raises(InvalidRequestError, match=r"39 tokens.* 2 of the 40 of max_model_len"):
        made.ask("x" * 39)


def test_a_question_that_never_fits_costs_no_turn(conversation):
    with pytest.raises(InvalidRequestError, match=r"31 tokens .* 10 of the 40 .*--max-model-len"):
        conversation.ask("x" * 30)
    assert len(conversation) == 3


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ChatTemplateError("refused")])
def test_what_ends_the_making_of_a_prompt_costs_no_turn(raised):
    calls = 0

    def tokenize(messages) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 2:  # when the oldest turn is left out
            raise raised
        return by_characters(messages)

    made = Conversation(tokenize, length=40, max_tokens=None, system="S")
    for number in range(3):
        made.answered(f"q{number}", f"a{number}")
    with pytest.raises(KeyboardInterrupt if raised is KeyboardInterrupt else ChatTemplateError):
        made.ask("x" * 22)
    assert len(made) == 3
    assert text(made.ask("q3")[0]) == "Sq0a0q1a1q2a2q3"
