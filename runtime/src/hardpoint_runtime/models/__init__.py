"""Models, built from named operations and run in a forward context."""

from hardpoint_runtime.models.architectures import ARCHITECTURES, build_model
from hardpoint_runtime.models.language_model import LanguageModel

__all__ = ["ARCHITECTURES", "LanguageModel", "build_model"]
