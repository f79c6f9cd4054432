"""Memory that can sleep where the driver cannot part addresses from memory: tensors get other
memory when they wake.

Within ``use(tag)`` the storage of every tensor that is made is noted. Asleep, a storage is empty;
awake again, it has new memory, and the tensors and views over it find that. Whatever knows an
address, as captured graphs do, is wrong then: sleep and graphs exclude each other on such devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import define
from hardpoint.records import SleepReport
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint_runtime.accelerator.placed_pools import MADE
from hardpoint_runtime.accelerator.pools import AddressKeepingPools, HostBuffer


@define(eq=False)
class Noted:
    """One storage under ``tag``: ``num_bytes`` while it is awake, and ``backup`` of what it holds
    while it sleeps, None where that is lost.
    """

    tag: str
    reference: StorageWeakRef
    num_bytes: int
    asleep: bool = False
    backup: torch.Tensor | None = None

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; None if nobody uses it any more."""
        return torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)  # noqa: SLF001


class MovingPools(AddressKeepingPools):
    """Storages of one device by tag. Built by ``AcceleratorDeviceOps.make_pools``.

    ``give_back`` returns to the device what torch's allocator keeps and no tensor uses.
    """

    def __init__(
        self,
        host_buffer: HostBuffer,
        synchronize: Callable[[], None],
        give_back: Callable[[], None],
    ) -> None:
        self._host_buffer = host_buffer
        self._synchronize = synchronize
        self._give_back = give_back
        self._noted: list[Noted] = []

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Note the tensors that are made, on this thread."""
        with _Noting(self, tag):
            yield

    def note(self, tag: str, tensor: torch.Tensor) -> None:
        """Count a tensor's storage under ``tag``, unless it is already."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if all(each.reference.cdata != reference.cdata for each in self._of(None)):
            self._noted.append(Noted(tag, reference, storage.nbytes()))

    def take_in(self, tag: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Note what was not; nothing moves. Return what has no storage of its own."""
        left = {name: each for name, each in tensors.items() if each.layout != torch.strided}
        for name, tensor in tensors.items():
            if name not in left and tensor.numel():
                self.note(tag, tensor)
        return left

    def held(self, tags: Iterable[str] | None = None) -> int:
        """Return the bytes that storages (of ``tags``) hold of the device now."""
        return sum(each.num_bytes for each in self._of(tags) if not each.asleep)

    @property
    def asleep(self) -> int:
        """The bytes of storages that are empty now."""
        return sum(each.num_bytes for each in self._of(None) if each.asleep)

    @property
    def rounding(self) -> int:
        """Nothing: torch's allocator cuts its own pieces."""
        return 0

    def sleep(self, tags: Collection[str], keep: Collection[str] = ()) -> SleepReport:
        """Empty the storages of ``tags``; those also in ``keep`` are copied to the host first. All
        copies are made before anything is given back.
        """
        self._synchronize()
        noted = self._of(tags)
        copies = {id(each): self._copied(each) for each in noted if each.tag in keep}
        freed = 0
        for each in noted:
            storage = each.storage()
            if not each.asleep and storage is not None:
                each.backup = copies.get(id(each))
                storage.resize_(0)
                each.asleep, freed = True, freed + each.num_bytes
            elif each.tag not in keep:
                each.backup = None
        self._synchronize()
        self._give_back()
        kept = sum(copy.numel() for copy in copies.values() if copy is not None)
        return SleepReport(bytes_freed=freed, bytes_backed_up=kept, bytes_still_held=self.held())

    def wake(self, tags: Collection[str]) -> SleepReport:
        """Give the storages of ``tags`` memory again, with what was kept of them; of the others the
        contents are undefined. Raises torch.OutOfMemoryError if the device has not enough; calling
        it again goes on.
        """
        for each in self._of(tags):
            storage = each.storage()
            if each.asleep and storage is not None:
                storage.resize_(each.num_bytes)
                each.asleep = False
            if each.backup is not None and storage is not None:
                _bytes(storage).copy_(each.backup)
                each.backup = None
        self._synchronize()
        return SleepReport(bytes_freed=0, bytes_backed_up=0, bytes_still_held=self.held())

    def close(self) -> None:
        """Forget all storages."""
        self._noted.clear()

    def _of(self, tags: Iterable[str] | None) -> list[Noted]:  # type: ignore[override]
        self._noted = [each for each in self._noted if not each.reference.expired()]
        wanted = None if tags is None else set(tags)
        return [each for each in self._noted if wanted is None or each.tag in wanted]

    def _copied(self, noted: Noted) -> torch.Tensor | None:
        storage = noted.storage()
        if noted.asleep or storage is None:
            return None
        copy = self._host_buffer((noted.num_bytes,), torch.uint8)
        return copy.copy_(_bytes(storage))


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is made."""

    def __init__(self, pools: MovingPools, tag: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pools = pools
        self._tag = tag

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, to skip it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; note what it makes."""
        made = func(*args, **(kwargs or {}))
        if func in MADE and made.numel() and made.device.type != "meta":
            self._pools.note(self._tag, made)
        return made


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
