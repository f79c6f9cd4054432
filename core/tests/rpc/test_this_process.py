"""A process knows its own number, a forked one too."""

from __future__ import annotations

import os

import pytest
from hardpoint.rpc.this_process import THIS


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_knows_its_own_number():
    assert THIS.pid == os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(0 if THIS.pid == os.getpid() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert THIS.pid == os.getpid()
