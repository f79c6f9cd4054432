"""The torch toolkit that Hardpoint platform plugins are built from, neutral of device."""

API = (2, 0)
"""This toolkit as a contract: DeviceOps, operations, TorchWorker, TorchModelRunner."""

__all__ = ["API"]
