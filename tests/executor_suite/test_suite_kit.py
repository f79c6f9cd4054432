"""The conformance kit over the other ways in which ``mp`` starts workers and carries calls. What
every executor must do is asked there; the other modules here ask what is only of this house.
"""

from __future__ import annotations

import pytest
from hardpoint_conformance import ExecutorSuite

TestPlain = pytest.mark.slow(ExecutorSuite.of("mp", settings={"plugins.mp.start": "plain"}))
TestZmq = pytest.mark.slow(ExecutorSuite.of("mp", settings={"plugins.mp.channel": "zmq"}))
