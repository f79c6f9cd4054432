"""Several hosts with networks of their own: namespaces with a cable between them, which is cut."""

from __future__ import annotations

import subprocess
import sys
import uuid

import psutil
import pytest

pytestmark = pytest.mark.slow
LEADER, FOLLOWER = "198.18.77.1", "198.18.77.2"
COMMAND = "import sys; from hardpoint.cli import main; sys.exit(main(sys.argv[1:]))"


class Cable:
    """Two network namespaces, of leader and follower, and the pair of devices between them."""

    def __init__(self):
        mark = uuid.uuid4().hex[:6]
        self.spaces = [f"hp-{mark}-{side}" for side in ("leader", "follower")]
        self.ends = [f"hp{mark}{side}" for side in "ab"]
        self.processes = []

    def lay(self):
        for space in self.spaces:
            _ip("netns", "add", space)
        first, second = self.spaces
        _ip("-n", first, "link", "add", self.ends[0], "type", "veth",
            "peer", "name", self.ends[1], "netns", second)  # fmt: skip
        for space, end, address in zip(self.spaces, self.ends, (LEADER, FOLLOWER), strict=True):
            _ip("-n", space, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def cut(self):
        _ip("-n", self.spaces[1], "link", "set", self.ends[1], "down")

    def run(self, side, *arguments, **options):
        inside = ["ip", "netns", "exec", self.spaces[side]]
        process = subprocess.Popen(
            [*inside, sys.executable, "-P", "-c", COMMAND, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(60)
            process.stdout.close(), process.stderr.close()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def cable():
    made = Cable()
    try:
        made.lay()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        why = getattr(error, "stderr", "") or error
        pytest.skip(f"network namespaces cannot be made here: {why}")
    yield made
    made.close()


def test_a_cut_between_hosts_ends_both_sides_and_is_told(cable, tmp_path):
    key, leader = str(tmp_path / "key"), f"{LEADER}:5700"
    follower = cable.run(1, "worker", "--join", leader, "--key-file", key, "--wait", "30",
                         "--set", "plugins.mp.peer_timeout=3")  # fmt: skip
    driver = cable.run(
        0, "generate", "--raw", "--executor", "mp", "--platform", "dummy",
        "--load-format", "dummy", "--model", "dummy", "--nnodes", "2",
        "--set", f"plugins.mp.leader={leader}", "--set", f"plugins.mp.key_file={key}",
        "--set", "plugins.mp.peer_timeout=3", "--set", "plugins.dummy.num_workers=2",
        "--set", "plugins.dummy.step_seconds=1.0", "--max-tokens", "200", "--ignore-eos", "hi",
    )  # fmt: skip
    assert driver.stdout.read(1), "the control: both sides work"
    workers = psutil.Process(follower.pid).children(recursive=True)
    assert workers
    cable.cut()
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 1
    assert f"(node 1, {FOLLOWER}) is lost" in said
    assert "ranks 1" in said
    _, said = follower.communicate(timeout=120)
    assert follower.returncode == 3
    assert f"the leader at {leader}" in said
    assert "its workers here end" in said
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_hosts_with_networks_of_their_own_answer_and_end_in_good_order(cable, tmp_path):
    key, leader = str(tmp_path / "key"), f"{LEADER}:5700"
    follower = cable.run(1, "worker", "--join", leader, "--key-file", key, "--wait", "90")
    driver = cable.run(
        0, "generate", "--raw", "--executor", "mp", "--platform", "dummy",
        "--load-format", "dummy", "--model", "dummy", "--nnodes", "2",
        "--set", f"plugins.mp.leader={leader}", "--set", f"plugins.mp.key_file={key}",
        "--set", "plugins.dummy.num_workers=2", "--max-tokens", "4", "--ignore-eos", "hi",
    )  # fmt: skip
    out, said = driver.communicate(timeout=120)
    assert driver.returncode == 0, said
    assert out.strip()
    assert follower.wait(60) == 0
