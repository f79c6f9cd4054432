"""The ``external_launcher`` executor is conformant, as the one process of its launcher."""

from __future__ import annotations

import pytest
from hardpoint_conformance import ExecutorSuite, PluginSuite


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


TestPlugin = PluginSuite.of("external_launcher")
TestExecutor = ExecutorSuite.of("external_launcher")
