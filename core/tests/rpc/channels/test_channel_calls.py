"""What every channel does, whatever carries the bytes: real processes at the other end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from pickle import PickleBuffer

import pytest
from hardpoint.errors import CallTimeoutError, EncodingError, RemoteError
from hardpoint.rpc import codec
from hardpoint.rpc.channel import ChannelClosedError

MIB = 1 << 20


def pattern(size, seed=0):
    return bytearray(hashlib.sha256(bytes([seed])).digest() * (size // 32))


@pytest.fixture
def group(kind, make_group):
    return make_group(kind, 3)


def test_values_arrive_in_rank_order_and_equal(group):
    value = {"a": [1, (2.5, None)], "text": "é" * 5000, "bytes": bytes(range(256)) * 40}
    assert group.call("echo", value) == [value] * 3
    assert group.call("rank_of") == [0, 1, 2]
    assert group.call("rank_of", reply_rank=2) == 2
    assert group.call("nothing") == [None] * 3


def test_replies_belong_to_their_calls_in_any_order(group, tmp_path):
    gate = group.call("gate", tmp_path / "in", tmp_path / "open", non_block=True)
    behind = [group.call("echo", number, non_block=True) for number in range(50)]
    assert not gate.done()
    (tmp_path / "open").touch()
    assert behind[17].result(60) == [17] * 3
    assert gate.result(60) == [0, 1, 2]
    assert [future.result(60) for future in behind] == [[number] * 3 for number in range(50)]


def test_errors_come_with_their_rank_and_later_calls_are_well(group):
    with pytest.raises(RemoteError, match=r"rank \d raised ValueError in .fail.: broken") as caught:
        group.call("fail", "broken")
    assert isinstance(caught.value.__cause__, ValueError)
    assert group.call("rank_of") == [0, 1, 2]


def test_what_cannot_be_sent_is_not_sent(group):
    with pytest.raises(EncodingError, match=r"^args\[0\]\[1\] cannot be sent"):
        group.call("echo", [1, threading.Lock()])
    assert group.table.pending == 0
    assert group.call("echo", 1) == [1] * 3


def test_a_result_that_cannot_be_sent_is_that_calls_error(group):
    with pytest.raises(RemoteError, match="result of 'lock' cannot be sent"):
        group.call("lock")
    assert group.call("echo", 1) == [1] * 3


def test_arguments_that_cannot_be_rebuilt_are_that_calls_error(group):
    class Unbuildable:
        def __reduce__(self):
            return (int, ("not a number",))

    with pytest.raises(RemoteError, match="arguments of 'echo' was sent but cannot be rebuilt"):
        group.call("echo", Unbuildable())
    assert group.call("echo", 1) == [1] * 3


@pytest.mark.parametrize("size", [96, 70_016, 3 * MIB, 30 * MIB])
def test_buffers_of_any_size_come_back_equal(group, size):
    data = pattern(size)
    apart = size >= 65536  # and read-only then: it is everybody's
    assert group.call("size", PickleBuffer(data)) == [(size, apart)] * 3
    for back in group.call("back", PickleBuffer(data)):
        assert bytes(back) == data


def test_64_mib_go_and_large_values_too_that_are_no_buffers(kind, make_group):
    group = make_group(kind, 1)
    assert group.call("size", PickleBuffer(pattern(64 * MIB))) == [(64 * MIB, True)]
    text = "x" * (9 * MIB)
    assert group.call("echo", text) == [text]


@pytest.mark.parametrize("size", [codec.LARGE_BYTES - 1, codec.LARGE_BYTES, 3 * MIB])
def test_bytes_arrive_as_bytes_however_they_travel(group, size):
    data = bytes(pattern(size + 31))[:size]
    for back in group.call("echo", data):
        assert type(back) is bytes
        assert back == data


def test_what_a_worker_keeps_stays_as_it_was(group):
    digests = {}
    for number in range(4):
        data = pattern(MIB, number)
        group.call("keep", number, PickleBuffer(data))
        digests[number] = hashlib.sha256(data).hexdigest()
        data[:] = bytes(MIB)  # the caller's own memory is the caller's again
    for number in range(10, 60):
        group.call("size", PickleBuffer(pattern(MIB, number)))
    for number, digest in digests.items():
        assert group.call("digest", number) == [digest] * 3


def test_what_the_driver_keeps_stays_as_it_was_even_when_the_channel_is_closed(kind, make_group):
    group = make_group(kind, 1)
    kept = [group.call("back", PickleBuffer(pattern(MIB, number)))[0] for number in range(3)]
    for number in range(10, 40):
        group.call("back", PickleBuffer(pattern(MIB, number)))
    group.stop()
    for number, view in enumerate(kept):
        assert bytes(view) == pattern(MIB, number)


def test_a_timeout_leaves_the_channel_well(group, tmp_path):
    with pytest.raises(CallTimeoutError):
        group.call("gate", tmp_path / "in", tmp_path / "open", timeout=0.1)
    (tmp_path / "open").touch()
    assert group.call("echo", 5) == [5] * 3


def test_late_replies_are_taken_though_nobody_waits(group, tmp_path, wait_until):
    with pytest.raises(CallTimeoutError):
        group.call("gate", tmp_path / "in", tmp_path / "open", timeout=0.1)
    assert group.table.pending == 1
    (tmp_path / "open").touch()
    wait_until(lambda: group.table.pending == 0)
    assert group.table.late_replies == 3


def test_a_channel_has_no_name_anywhere(kind, make_group, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = make_group(kind, 2)
    group.call("size", PickleBuffer(pattern(MIB)))
    assert list(tmp_path.iterdir()) == []
    for fd in group.end.worker_handle(1).fds:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
        nameless = target.startswith(("/memfd:", "anon_inode:")) or target.endswith(" (deleted)")
        assert nameless, target


def test_where_a_socket_needs_a_name_it_is_its_users_alone_and_for_a_moment(
    make_group, monkeypatch, tmp_path
):
    """As on systems without descriptors of mere paths."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "O_PATH")
    group = make_group("zmq", 2, start=False)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_ISSOCK(each.stat().st_mode) for each in folder.iterdir()] == [True]
    assert group.end.worker_handle(0).fds == ()
    for rank in range(2):
        group.start_process(rank)
    assert group.call("echo", 5) == [5, 5]
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_every_descriptor_back_and_tells_the_workers(kind, make_group):
    def open_files():
        # a number may be in use for the listing itself
        found = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(entry.readlink()))
        return sorted(target for target in found if "/proc/" not in target)

    warm = make_group(kind, 1)
    warm.call("size", PickleBuffer(pattern(MIB)))  # what libraries open once
    warm.stop()
    before = open_files()
    group = make_group(kind, 2)
    group.call("size", PickleBuffer(pattern(MIB)))
    assert len(open_files()) > len(before)
    group.stop()
    group.stop()
    assert open_files() == before
    with pytest.raises(ChannelClosedError):
        group.call("echo", 1)


def test_no_spinning_at_all_is_possible(kind, make_group):
    group = make_group(kind, 2, spin_us=0)
    for number in range(200):
        assert group.call("echo", number) == [number] * 2


def test_nobody_is_busy_while_nobody_calls(kind, make_group):
    group = make_group(kind, 4)
    group.call("echo", 1, non_block=True).result(60)
    group.call("echo", 2)
    time.sleep(0.005)
    began, before = time.monotonic(), time.process_time() + sum(group.call("cpu"))
    time.sleep(2.0)
    used = time.process_time() + sum(group.call("cpu")) - before
    # Two calls and their wake-ups are in it: 8 ms is 0.4 % of two seconds.
    assert used < 0.004 * (time.monotonic() - began) + 0.004, f"{used} s of processor time"
