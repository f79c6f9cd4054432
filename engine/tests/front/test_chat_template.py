"""Templates come from strangers: rendered as the hub renders them, bounded in reach and in work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import markupsafe
import pytest
from hardpoint_engine.text import template_process
from hardpoint_engine.text.chat_template import ChatTemplate, ChatTemplateError
from hardpoint_engine.text.template_pool import MOST_AT_ONCE
from hardpoint_engine.text.template_process import environment

REFUSALS = ("SecurityError", "UndefinedError", "TypeError", "AttributeError")
HELLO = [{"role": "user", "content": "héllo 🙂"}]


@pytest.fixture
def template():
    made = []

    def make(source, values=None, **limits) -> ChatTemplate:
        made.append(ChatTemplate(source, values or {}, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def child(template: ChatTemplate) -> subprocess.Popen:
    return template._pool._idle[-1]._child


def test_messages_become_a_prompt(template):
    source = (
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.first %}\n[{{ m['role'] }}]"
        "{{ m.content }}\n    {% endif %}\n{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    one = template(source, {"bos_token": "<s>"})
    assert one.render(HELLO) == "<s>[user]héllo 🙂\n:"
    assert one.render(HELLO, add_generation_prompt=False) == "<s>[user]héllo 🙂\n"


def test_names_that_templates_count_on(template):
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}{% generation %} all {% endgeneration %}"
        "{{ {'a': 'é<'} | tojson }}{{ strftime_now('%Y') | length }}{{ extra }}"
    )
    assert template(source).render([], extra="!") == '02 all {"a": "é<"}4!'


def test_one_process_serves_many_renderings(template):
    one = template("{{ messages[0].content }}")
    one.start()
    pid = child(one).pid
    for text in ("a", "b" * 1_000_000, "c\n\x00"):
        assert one.render([{"role": "user", "content": text}]) == text
    assert child(one).pid == pid


def test_tools_take_the_template_for_tools_where_there_is_one(template):
    tools = [{"type": "function", "function": {"name": "look"}}]
    for one, expected in (
        (template("plain", tool_source="{{ tools[0].function.name }}"), "look"),
        (template("plain"), "plain"),
        (template(None, tool_source="only"), "only"),
    ):
        assert one.render(HELLO, tools=tools) == expected
        assert one.render(HELLO, tools=tools, source="own") == "own"
    two = template("plain", tool_source="with tools")
    assert [two.render(HELLO), two.render(HELLO, tools=None)] == ["plain", "plain"]


def test_what_a_template_refuses_is_told(template):
    one = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refuses the messages: roles must alternate"):
        one.render(HELLO)
    with pytest.raises(ChatTemplateError, match="TemplateSyntaxError"):
        template("{% if %}").render(HELLO)
    with pytest.raises(ChatTemplateError, match=r"no chat template.*--raw"):
        template(None).render(HELLO)
    with pytest.raises(ChatTemplateError, match="plain data"):
        template("x").render([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''|attr('format')|attr('__globals__') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ('{0.__class__}'|attr('for' ~ 'mat'))(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_nothing_outside_is_reached(template, source):
    one = template(source)
    try:
        text = one.render(HELLO)
    except ChatTemplateError as error:
        text = str(error).removeprefix("the model's chat template cannot be rendered: ")
        assert text.startswith(REFUSALS)
    else:
        assert not text.strip()


def test_endless_work_is_killed_and_the_next_rendering_works(template):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    one = template(
        "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}ok", time_limit=0.5
    )
    assert one.render(HELLO) == "ok"
    process = child(one)
    with pytest.raises(ChatTemplateError, match=r"longer than 0\.5 s"):
        one.render([{"role": "user", "content": "loop"}])
    assert process.returncode == -signal.SIGKILL
    assert one.render(HELLO) == "ok"


def test_closing_ends_a_rendering_too(template):
    one = template("{{ (9 ** (9 ** 9)) is odd }}", time_limit=60)
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(one.render, HELLO)
        while not one._pool._busy:
            time.sleep(0.001)
        one.close()
        with pytest.raises(ChatTemplateError, match="signal 9"):
            work.result(30)
    assert not one._pool._busy
    assert not one._pool._idle


def test_a_rendering_that_finds_the_others_at_work_has_a_process_of_its_own(template):
    """But no more than there may be; the next one waits for its turn."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    one = template("{% if messages[0].content == 'loop' %}" + loop + "{% endif %}ok", time_limit=60)
    busy = [{"role": "user", "content": "loop"}]
    with ThreadPoolExecutor(MOST_AT_ONCE + 1) as pool:
        works = [pool.submit(one.render, busy) for _ in range(MOST_AT_ONCE - 1)]
        while len(one._pool._busy) < len(works):
            time.sleep(0.001)
        assert [one.render(HELLO) for _ in range(3)] == ["ok"] * 3
        assert len(one._pool._idle) == 1
        works.append(pool.submit(one.render, busy))
        while len(one._pool._busy) < MOST_AT_ONCE:
            time.sleep(0.001)
        late = pool.submit(one.render, HELLO)
        next(iter(one._pool._busy)).kill()
        assert late.result(30) == "ok"
        assert len(one._pool._busy) == MOST_AT_ONCE - 1
        one.close()
        for work in works:
            with pytest.raises(ChatTemplateError, match="signal 9"):
                work.result(30)


def test_work_in_native_code_is_killed_too(template):
    with pytest.raises(ChatTemplateError, match=r"longer than 0\.3 s"):
        template("{{ (9 ** (9 ** 9)) is odd }}", time_limit=0.3).render(HELLO)


def test_output_is_bounded(template):
    one = template("{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}", most_characters=10_000)
    with pytest.raises(ChatTemplateError, match="more than 10000 characters"):
        one.render(HELLO)
    with pytest.raises(ChatTemplateError, match="too much memory"):
        template("{{ 'a' * (10 ** 9) }}").render(HELLO)


def test_a_process_that_dies_is_told_and_replaced(template):
    one = template("ok")
    assert one.render(HELLO) == "ok"
    os.kill(child(one).pid, signal.SIGKILL)
    with pytest.raises(ChatTemplateError, match="signal 9"):
        one.render(HELLO)
    assert one.render(HELLO) == "ok"


def test_the_process_knows_no_secrets_and_ends_with_its_driver(monkeypatch, template):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    one = template("ok")
    assert one.render(HELLO) == "ok"
    process = child(one)
    assert b"s3cret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    process.stdin.close()  # what it sees when the driver is gone
    assert process.wait(60) == 0


def test_the_process_can_open_nothing_and_start_nothing(template):
    one = template("{{ messages[0].content }}")
    one.render(HELLO)
    limits = Path(f"/proc/{child(one).pid}/limits").read_text()

    def limit(name: str) -> list[str]:
        return re.search(rf"^{name} +(\S+) +(\S+)", limits, re.MULTILINE).groups()

    assert limit("Max open files") == ("3", "3")
    assert limit("Max processes") == ("0", "0")
    assert 1 <= int(limit("Max cpu time")[0]) <= 15  # twice 5 s, and what its start took
    assert limit("Max file size") == limit("Max core file size") == ("0", "0")


def outside(program: str) -> subprocess.CompletedProcess:
    """Run Python in a process that is confined as that of a template, and outside the sandbox."""
    start = f"""
import os, signal, socket, sys
sys.path.insert(0, {str(Path(template_process.__file__).parent)!r})
import template_process
template_process.confine()
"""
    command = [sys.executable, "-I", "-c", start + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "program", ["open('/etc/passwd')", "socket.socket()", "os.pipe()", "os.listdir('/')"]
)
def test_whoever_leaves_the_sandbox_opens_nothing(program):
    done = outside(program)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr


def test_whoever_leaves_the_sandbox_starts_nothing():
    """But root does, so it is somebody else here."""
    program = "if os.geteuid() == 0: os.setuid(65534)\nos.fork()"
    assert "BlockingIOError" in outside(program).stderr


def test_whoever_leaves_the_sandbox_works_no_longer():
    done = outside("template_process.allow_work(0.2)\nwhile True: pass")
    assert done.returncode == -signal.SIGXCPU


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ strftime_now('%c %Z') | length > 5 }}", "True"),
        (r"{{ '\N{BULLET}' }}{{ {'b': [1]} | pprint }}", "•{'b': [1]}"),
        ("{{ [1] | random }}{{ lipsum(1, max=30) | length > 9 }}", "1True"),
        ("{{ 'http://a.com' | urlize }}{{ 'a b' | wordwrap(1) }}", "</a>a\nb"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 'x' * 3 | nofilter }}", "nofilter"),
        ("{% block a %}{{ super() }}{% endblock %}", "no parent block"),
    ],
)
def test_what_is_first_needed_by_a_template_is_there(template, source, words):
    """Nothing can be imported or read any more when a template asks for it."""
    try:
        text = template(source).render(HELLO)
    except ChatTemplateError as error:
        text = str(error)
    assert words in text
    assert "open files" not in text


def test_a_busy_process_ends_by_itself_when_nobody_kills_it():
    """Its driver may be gone: an alarm without a handler ends native code, too."""
    order = {"source": "{{ 9 ** (9 ** 9) }}", "values": {}, "most_characters": 10}
    paths = [str(Path(module.__file__).parents[1]) for module in (jinja2, markupsafe)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", template_process.__file__, "0.2", *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"{}\n"
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        assert process.wait(30) == -signal.SIGALRM
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_there_is_one_factory_of_environments():
    sources = Path(template_process.__file__).parent.glob("**/*.py")
    users = [
        path.name
        for path in sources
        if re.search(r"^\s*(import|from) jinja2", path.read_text(), re.MULTILINE)
    ]
    assert users == ["template_process.py"]


def test_an_old_sandbox_is_not_trusted(monkeypatch):
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    with pytest.raises(RuntimeError, match=r"3\.1\.6 is needed"):
        environment()
