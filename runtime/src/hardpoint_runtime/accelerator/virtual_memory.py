"""The port to a device's memory by addresses and by pages, apart: what sleep is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class VirtualMemory(ABC):
    """Ranges of addresses that are reserved once, and backed by memory only while somebody is
    awake. Written by plugins, over the driver of their device; used by
    :class:`~hardpoint_runtime.accelerator.pools.AddressKeepingPools`, on the worker's thread and on
    whatever thread lets the last tensor of a range go.

    Sizes are multiples of :attr:`granularity`. A method raises OSError with what the driver said.
    """

    granularity: int
    """The bytes of the smallest piece that can be mapped."""
    new_is_zero: ClassVar[bool] = False
    """Whether every byte of what is mapped is zero at first."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> int:
        """Return the first address of a new range, with nothing behind it."""

    @abstractmethod
    def map(self, address: int, num_bytes: int) -> None:
        """Put new memory, with undefined contents, behind a whole range, readable and writable by
        the device. Raises torch.OutOfMemoryError where the device has none left.
        """

    @abstractmethod
    def unmap(self, address: int, num_bytes: int) -> None:
        """Give the memory behind a range back to the device; the range stays reserved. All work
        that uses it is done.
        """

    @abstractmethod
    def release(self, address: int, num_bytes: int) -> None:
        """Give up a range that nothing is behind."""

    @abstractmethod
    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy from the device into a host tensor, uint8 [bytes], and wait for it."""

    @abstractmethod
    def write(self, address: int, values: torch.Tensor) -> None:
        """Copy a host tensor, uint8 [bytes], to the device, and wait for it."""
