"""The functions of ``amdsmi`` that detection calls, over GPUs that a test makes up."""

from __future__ import annotations

from types import SimpleNamespace


class AmdSmiException(Exception):  # noqa: N818 - the library's name
    pass


def gpu(number, gfx="gfx942", name="AMD Instinct MI300X", *, memory=192 << 30, partition="SPX"):
    """``partition`` None: a card that knows of none."""
    return SimpleNamespace(
        serial=f"0x{0x8A6F1C9E0000 + number:016X}", gfx=gfx, name=name, memory=memory,
        partition=partition,
    )  # fmt: skip


class FakeSmi:
    """``fails`` is what initialising says; ``lost`` is the number of a GPU that answers nothing."""

    asic_keys = ("market_name", "asic_serial", "target_graphics_version")
    AmdSmiException = AmdSmiException
    AmdSmiInitFlags = SimpleNamespace(INIT_AMD_GPUS=2)
    AmdSmiMemoryType = SimpleNamespace(VRAM="vram")

    def __init__(self, gpus=(), *, fails=None, lost=None):
        self.gpus = gpus
        self.fails = fails
        self.lost = lost
        self.opened = 0

    def amdsmi_init(self, flag):
        assert flag == 2
        if self.fails:
            raise AmdSmiException(self.fails)
        self.opened += 1

    def amdsmi_shut_down(self):
        self.opened -= 1

    def amdsmi_get_processor_handles(self):
        assert self.opened
        return list(self.gpus)

    def amdsmi_get_gpu_asic_info(self, handle):
        if self.lost is not None and handle is self.gpus[self.lost]:
            raise AmdSmiException("Error code:\n\t49 | AMDSMI_STATUS_NO_DATA")
        return dict(zip(self.asic_keys, (handle.name, handle.serial, handle.gfx), strict=True))

    def amdsmi_get_gpu_compute_partition(self, handle):
        if handle.partition is None:
            raise AmdSmiException("not supported")
        return handle.partition

    def amdsmi_get_gpu_memory_total(self, handle, kind):
        assert kind == "vram"
        return handle.memory
