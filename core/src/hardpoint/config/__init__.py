"""The configuration: frozen values with known origins. See :mod:`hardpoint.config.schema` for every
key.
"""

from hardpoint.config.loading import load_config
from hardpoint.config.schema import Config

__all__ = ["Config", "load_config"]
