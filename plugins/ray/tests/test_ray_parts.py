"""Who sits where, who is let in, and what is said without Ray: no Ray is started here."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest
from hardpoint.errors import ConfigError, ExecutorFailedError
from hardpoint.records import Placement
from hardpoint_multiproc import descriptors
from hardpoint_ray import plugin
from hardpoint_ray.handover import Handover, take

HERE, THERE, YONDER = "a" * 8, "b" * 8, "c" * 8


def bundles(*nodes):
    from hardpoint_ray.placement import Bundle

    return [Bundle(index=index, node_id=node) for index, node in enumerate(nodes)]


def assign(*arguments, indices=None):
    from hardpoint_ray.placement import assign

    return assign(*arguments, indices)


def test_the_driver_s_node_comes_first_then_those_with_fewer_bundles():
    seats = assign(bundles(THERE, YONDER, HERE, THERE, HERE), HERE, 5)
    assert [seat.bundle for seat in seats] == [2, 4, 1, 0, 3]
    assert [seat.local_rank for seat in seats] == [0, 1, 0, 0, 1]
    assert [seat.rank for seat in seats] == [0, 1, 2, 3, 4]


def test_bundle_indices_are_honoured():
    seats = assign(bundles(THERE, HERE, THERE), HERE, 2, indices=(2, 1))
    assert [seat.bundle for seat in seats] == [2, 1]


@pytest.mark.parametrize(
    ("nodes", "shards", "told"),
    [
        ((HERE, HERE, THERE, THERE), 2, []),
        ((HERE, THERE), 1, []),
        ((HERE, HERE, THERE), 3, ["ranks 0 to 2 are on 2 nodes"]),
        ((HERE, HERE, THERE, YONDER), 2, ["ranks 2 to 3 are on 2 nodes"]),
    ],
)
def test_tensor_shards_on_several_nodes_are_told_of(nodes, shards, told, caplog):
    from hardpoint_ray.placement import warn_of_spread

    warn_of_spread(assign(bundles(*nodes), HERE, len(nodes)), shards)
    assert len(caplog.messages) == len(told)
    for message, part in zip(caplog.messages, told, strict=True):
        assert part in message
        assert "STRICT_PACK" in message


@pytest.mark.parametrize(
    ("nodes", "count", "indices", "said"),
    [
        ((HERE,), 2, None, r"2 workers need as many bundles, .* has 1"),
        ((THERE, THERE), 2, None, r"none of the 2 bundles is on the driver's node"),
        ((HERE, HERE), 2, (0,), r"bundle_indices = \[0\]: 2 workers need as many different"),
        ((HERE, HERE), 2, (0, 0), r"bundle_indices = \[0, 0\]"),
        ((HERE, HERE), 2, (0, 7), r"bundles \[7\] cannot hold a worker; these can: \[0, 1\]"),
    ],
)
def test_what_cannot_be_placed_is_an_error_with_the_counts(nodes, count, indices, said):
    from hardpoint_ray.placement import PlacementError

    with pytest.raises(PlacementError, match=said):
        assign(bundles(*nodes), HERE, count, indices=indices)


def test_a_worker_may_own_several_devices_under_the_platform_s_own_key():
    from hardpoint_ray.placement import fits, needs

    assert needs(Placement(resources_per_worker={"TPU": 4})) == {"TPU": 4.0}
    assert fits({"TPU": 4.0}, {"TPU": 4.0, "CPU": 1.0})
    assert not fits({"TPU": 4.0}, {"TPU": 2.0})
    with pytest.raises(ConfigError, match="this platform names none"):
        needs(Placement())


def test_the_table_has_what_is_asked_and_free_of_each_node():
    from hardpoint_ray.placement import Node, table

    node = Node(node_id=HERE, address="10.0.0.1", total={"GPU": 8.0}, free={"GPU": 1.5})
    assert table({"GPU": 2.0}, 4, [node]).splitlines() == [
        "4 workers, each 2 GPU; free of all:",
        "  node aaaaaaaa (10.0.0.1): 1.5 of 8 GPU",
    ]


def test_without_ray_the_plugin_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    verdict = plugin.probe()
    assert not verdict.available
    assert "pip install 'ray>=2.59'" in verdict.reason


def test_a_ray_that_asks_for_no_token_is_refused(monkeypatch):
    monkeypatch.setattr(plugin, "_version", lambda: "2.58.1")
    assert "Ray 2.58.1 is too old" in plugin.probe().reason


def test_hidden_ray_is_told_by_the_command_and_nothing_imports_it():
    """Where Ray cannot be found the command says so; where it can, choosing does not import it."""
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'ray' else real(name, *more)\n"
        "from hardpoint.cli import main; main(['doctor'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Ray is not installed: pip install 'ray>=2.59'" in " ".join(done.stdout.split())
    code = (
        "import sys, hardpoint_ray.executor, hardpoint_ray.settings, hardpoint_ray.plugin as p\n"
        "assert p.probe().available; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The handover.


def test_descriptors_go_once_to_the_process_they_are_for_and_to_no_other():
    given = {os.getpid(): [descriptors.memory("test", b"hello")]}
    handover = Handover(lambda pid: given.pop(pid, None))
    thread = threading.Thread(target=_serve, args=(handover, 2))
    thread.start()
    (fd,) = take(handover.name)
    assert descriptors.contents(fd) == b"hello"
    with pytest.raises(ExecutorFailedError, match="has nothing for this process"):
        take(handover.name)
    thread.join(60)
    assert handover.refused == 1
    handover.close()
    os.close(fd)


def _serve(handover, count):
    for _ in range(count):
        select.select([handover], [], [], 60)
        handover.serve()


def test_a_foreign_process_is_refused():
    handover = Handover(lambda pid: [0] if pid == os.getpid() else None)
    code = f"from hardpoint_ray.handover import take; take({handover.name!r})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    select.select([handover], [], [], 60)
    assert handover.serve() is None
    assert handover.refused == 1
    _, error = child.communicate(timeout=60)
    assert "has nothing for this process" in error
    handover.close()


def test_the_socket_has_no_name_in_any_folder():
    handover = Handover(lambda pid: None)
    end = socket.socket(fileno=os.dup(handover.fileno()))
    assert end.getsockname() == b"\0" + handover.name.encode()
    end.close()
    handover.close()


def test_the_doctor_lists_ray_s_listeners_and_the_driver_s(monkeypatch):
    from hardpoint_ray.listeners import of_ray
    from hardpoint_ray.settings import RaySettings

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = of_ray(RaySettings(), 2)
    assert {each.address for each in own} == {"127.0.0.1:*"}
    joined = of_ray(RaySettings(address="10.0.0.1:6379", listen="10.0.0.7"), 2)
    assert [each.address for each in joined] == [
        "10.0.0.1:6379",
        "each node's address in Ray:*",
        "10.0.0.7:*",
        "10.0.0.7:*",
        "each node's address in Ray:*",
    ]


def test_no_ray_is_started_that_lets_in_anyone(monkeypatch):
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=disabled has it let in anyone"):
        session.connect(RaySettings(address="local"), {})


def test_ray_s_client_is_refused():
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    with pytest.raises(ExecutorFailedError, match="run the driver on a node of that Ray"):
        session.connect(RaySettings(address="ray://10.0.0.1:10001"), {})


def test_a_program_that_is_connected_by_ray_s_client_is_refused(monkeypatch):
    from hardpoint_ray import session
    from hardpoint_ray.settings import RaySettings

    monkeypatch.setattr(session.client, "is_connected", lambda: True)
    with pytest.raises(ExecutorFailedError, match="run the driver on a node of that Ray"):
        session.connect(RaySettings(), {})


def test_what_is_done_at_a_signal_is_kept_on_any_thread():
    import ctypes

    from hardpoint_ray import signal_actions

    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))

    def replace():
        with signal_actions.kept([signal.SIGUSR1]):
            ctypes.CDLL(None).signal(signal.SIGUSR1, 1)  # ignored, which Python does not know

    thread = threading.Thread(target=replace)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


@pytest.fixture
def listener():
    end = socket.create_server(("127.0.0.1", 0))
    yield end
    end.close()


@pytest.mark.parametrize("named", ["key", "variable"])
def test_an_address_at_which_nobody_listens_is_refused_at_once(listener, monkeypatch, named):
    from hardpoint_ray import connection, session
    from hardpoint_ray.settings import RaySettings

    address = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    name = "plugins.ray.address" if named == "key" else "RAY_ADDRESS"
    if named == "variable":
        monkeypatch.setenv(name, address)
    monkeypatch.setattr(connection.ray, "init", lambda **_: pytest.fail("Ray would try on and on"))
    with pytest.raises(ExecutorFailedError, match=f"{name} = '{address}' .*refused"):
        session.connect(RaySettings(address=address if named == "key" else None), {})


def test_an_address_that_answers_nothing_is_given_up_with_its_key(listener, monkeypatch, caplog):
    from hardpoint_ray import connection, session
    from hardpoint_ray.settings import RaySettings

    freed = threading.Event()
    monkeypatch.setattr(connection.ray, "init", lambda **_: freed.wait(60))
    monkeypatch.setattr(connection, "FIRST_LINE", 0.1)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    settings = RaySettings(address=address, start_timeout=0.5)
    with pytest.raises(ExecutorFailedError, match=f"plugins.ray.address = '{address}' did not"):
        session.connect(settings, {})
    assert any("waiting for the Ray at" in line for line in caplog.messages)
    with pytest.raises(ExecutorFailedError, match="start another process"):
        session.connect(settings, {})
    stuck = connection.Connection.stuck
    freed.set()
    stuck._thread.join(60)
    assert not stuck._thread.is_alive()
