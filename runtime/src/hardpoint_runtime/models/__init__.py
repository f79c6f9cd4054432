"""Models, built from named operations and run in a forward context."""

from hardpoint_runtime.models.architectures import ARCHITECTURES, attention_needs, build_model
from hardpoint_runtime.models.language_model import LanguageModel

__all__ = ["ARCHITECTURES", "LanguageModel", "attention_needs", "build_model"]
