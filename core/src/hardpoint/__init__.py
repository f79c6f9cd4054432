"""Hardpoint: contracts on which LLM inference hardware is hung. Importing it runs no plugin."""

API = (2, 0)
"""The number of these contracts (hooks, records, ABCs, messages). A core with major N serves
plugins for N and N-1.
"""

__version__ = "0.1.0"
