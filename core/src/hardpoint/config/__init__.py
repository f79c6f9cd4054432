"""The configuration: frozen values with known origins. See :mod:`hardpoint.config.schema` for every
key.
"""

from hardpoint.config.schema import Config

__all__ = ["Config"]
