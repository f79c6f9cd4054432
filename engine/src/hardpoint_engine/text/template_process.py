"""The process that renders chat templates. A program of its own, started by
:mod:`hardpoint_engine.text.chat_template`; it imports the standard library and jinja2 only.

A template comes from a model's files, so it is hostile until proven otherwise. The sandbox bounds
what it can reach, not how much it works; so this process has little memory, no secrets in its
environment, opens no file or socket, starts no process (root may), and is killed when it takes too
long. Lines of JSON come in and go out, one answer each.

What a template could still do if it left the sandbox: whatever needs nothing opened, as the same
user. Signals to that user's processes, for one.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

LEAST_JINJA = (3, 1, 6)
"""Earlier sandboxes can be left through ``|attr`` (CVE-2025-27516)."""
MOST_MEMORY_BYTES = 512 << 20
STANDARD_FILES = 3
"""Standard input, output and error: no file, socket or pipe can be opened beside them."""


class RefusedByTemplateError(Exception):
    """The template itself called ``raise_exception``: it does not take these messages."""


def refuse(message: object) -> NoReturn:
    """Serve ``raise_exception(...)`` in templates."""
    raise RefusedByTemplateError(str(message))


def to_json(value: object, indent: int | None = None, **more: Any) -> str:
    """Serve ``|tojson`` in templates: as is, without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **more)


def now(form: str) -> str:
    """Serve ``strftime_now(...)`` in templates: local time."""
    return datetime.now().astimezone().strftime(form)


def environment() -> jinja2.Environment:
    """Make the one kind of environment that templates are rendered in.

    Sandboxed, immutable arguments, with the names that model templates count on (the convention of
    the Hugging Face hub): ``raise_exception``, ``strftime_now``, ``tojson``, ``break`` and
    ``continue``, and ``{% generation %}`` blocks, which are shown as they are.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdecimal())
    if found < LEAST_JINJA:
        wanted = ".".join(map(str, LEAST_JINJA))
        raise RuntimeError(f"jinja2 {jinja2.__version__} is installed; {wanted} is needed")

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - so declared by jinja2

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = now
    return made


def render(made: jinja2.Environment, order: Mapping[str, Any]) -> str:
    """Render ``order["source"]`` with ``order["values"]``, piece by piece, up to
    ``order["most_characters"]``.
    """
    most = order["most_characters"]
    pieces, length = [], 0
    for piece in made.from_string(order["source"]).generate(**order["values"]):
        length += len(piece)
        if length > most:
            raise ValueError(f"it gives more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(made: jinja2.Environment, line: bytes) -> dict[str, str]:
    """Return a table with ``text``, ``refused`` (by the template itself) or ``error``."""
    try:
        return {"text": render(made, json.loads(line))}
    except RefusedByTemplateError as error:
        return {"refused": str(error)[:2000]}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # noqa: BLE001 - the template decides what is raised
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def warm_up(made: jinja2.Environment) -> None:
    """Have read what Python and jinja2 read when it is first needed: later nothing can be."""
    import textwrap  # noqa: F401 - as the next one: imported by code that templates call
    import unicodedata  # noqa: F401

    import jinja2.constants
    import jinja2.debug  # noqa: F401

    now("%c")  # the time zone's file
    for source in (r"{{ '\N{DASH}' | pprint }}{{ lipsum(1) }}", "{{ 1 / 0 }}", "{% if %}"):
        order: dict[str, Any] = {"source": source, "values": {}, "most_characters": 1 << 20}
        answer(made, json.dumps(order).encode())


def confine() -> None:
    """Take from this process, for good, what no rendering needs."""
    for kind, most in (
        (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, STANDARD_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))


def allow_work(seconds: float) -> None:
    """Let the kernel end this process after ``seconds`` more of processor time, rounded up. Its
    limit counts the whole life, so it is moved on for each order.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main() -> None:
    """Serve orders until standard input ends. argv: seconds for one order, then import paths."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver alone decides what Ctrl-C ends
    seconds = float(sys.argv[1])
    sys.path += sys.argv[2:]
    made = environment()
    warm_up(made)
    confine()
    out = sys.stdout.buffer
    out.write(b"{}\n")
    out.flush()
    while line := sys.stdin.buffer.readline():
        # The driver kills sooner; this ends the work of one whose driver is gone.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        allow_work(2 * seconds)
        result = answer(made, line)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(result).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
