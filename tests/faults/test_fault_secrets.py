"""Where secrets may not turn up (S7): commands and variables of any process, logs, error texts.

Workers inherit what stands in the driver's environment, as any child does; what is in the
configuration or in a call they get by memory without a name.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
from hardpoint.errors import CallTimeoutError, EncodingError, RemoteError, WorkerDiedError

INHERITED, CONFIGURED, HANDED, ASKED = (
    f"s3cret-{what}" for what in ("env", "config", "hook", "call")
)


def use(worker, secret, what="nothing", **more):
    if what == "raise":
        raise ValueError("of its own text")
    if what == "sleep":
        time.sleep(1)
    if what == "exit":
        os._exit(7)
    return os.environ["TEST_TOKEN"], worker.context.config.settings_of("dummy").trace_folder, secret


def text_of(error):
    """Return all that a user may see of an error, its cause included."""
    seen = ""
    while error is not None:
        seen += "\n".join((repr(error), str(error), *getattr(error, "__notes__", ())))
        error = error.__cause__ or error.__context__
    return seen


def told(executor, *, expected, what, more=None):
    """Have a call with the secret fail in the given way; return what is told of it."""
    call = functools.partial(use, what=what, more=more, token=ASKED)
    with pytest.raises(expected) as caught:
        executor.collective_rpc(call, args=(ASKED,), timeout=0.3 if what == "sleep" else 30)
    return text_of(caught.value)


@pytest.mark.parametrize("channel", ["shared_memory", "zmq"])
@pytest.mark.parametrize("start", ["nursery", "plain"])
def test_no_secret_is_seen_from_outside(
    groups, monkeypatch, caplog, capfd, tmp_path, channel, start
):
    monkeypatch.setenv("TEST_TOKEN", INHERITED)
    keys = {
        "plugins.mp.channel": channel,
        "plugins.mp.start": start,
        "plugins.dummy.trace_folder": str(tmp_path / CONFIGURED),
        "plugins.mp.warn_after": 0.2,
    }
    caplog.set_level(logging.DEBUG, logger="hardpoint")
    logging.getLogger("hardpoint").setLevel(logging.DEBUG)  # the workers', too
    executor = groups.built(**keys)
    executor.platform.environment = lambda config, placement: {"LD_TOKEN": HANDED}
    if start == "nursery":
        with pytest.raises(Exception, match="LD_TOKEN") as caught:
            executor.start_workers()
        assert HANDED not in text_of(caught.value)
        executor = groups.ready(**keys)
    else:
        executor.start_workers()
    answers = executor.collective_rpc(functools.partial(use, token=ASKED), args=(ASKED,))
    assert answers[0] == (INHERITED, str(tmp_path / CONFIGURED), ASKED), "they have them"
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert len(processes) > 4
    for process in processes:
        command = " ".join(process.cmdline())
        assert "s3cret" not in command, command
        environ = Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
        assert CONFIGURED not in environ
        assert ASKED not in environ
    texts = [
        told(executor, expected=RemoteError, what="raise"),
        told(executor, expected=CallTimeoutError, what="sleep"),
        told(executor, expected=EncodingError, what="nothing", more={ASKED[:1]: threading.Lock()}),
        told(executor, expected=WorkerDiedError, what="exit"),
    ]
    texts += [caplog.text, *capfd.readouterr()]
    assert "has been busy with use" in caplog.text
    for text in texts:
        assert "s3cret" not in text, text


@pytest.mark.parametrize("fault", ["build", "load=exit"])
def test_no_secret_is_told_of_a_start_that_fails(
    groups, monkeypatch, caplog, capfd, tmp_path, fault
):
    monkeypatch.setenv("TEST_TOKEN", INHERITED)
    caplog.set_level(logging.DEBUG, logger="hardpoint")
    keys = {
        "plugins.dummy.trace_folder": str(tmp_path / CONFIGURED),
        "plugins.dummy.fail_at": fault,
    }
    with pytest.raises((RemoteError, WorkerDiedError)) as caught:
        groups.loaded(**keys)
    for text in (text_of(caught.value), caplog.text, *capfd.readouterr()):
        assert "s3cret" not in text, text
