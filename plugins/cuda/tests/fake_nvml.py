"""The functions of ``pynvml`` that detection calls, over GPUs that a test makes up."""

# ruff: noqa: N802 - the library's names

# ruff: noqa: N802 - the library's names

from __future__ import annotations

from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
TEXTS = {
    3: "Not Supported", 6: "Not Found", 9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found", 13: "Function Not Found", 15: "GPU is lost",
    18: "Driver/library version mismatch",
}  # fmt: skip


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(TEXTS[value])
        self.value = value


def gpu(number, name="NVIDIA H200", *, memory=141 << 30, capability=(9, 0), slices=None):
    """``slices``: names of the instances of a divided GPU, None for an empty place."""
    return SimpleNamespace(
        uuid=f"GPU-8a6f1c9e-{number:04}", name=name, memory=memory, capability=capability,
        slices=None if slices is None else [
            each and SimpleNamespace(uuid=f"MIG-{number}{place}aa-{place:04}", name=each,
                                     memory=memory // 7)
            for place, each in enumerate(slices)
        ],
    )  # fmt: skip


class FakeNvml:
    """``fails`` is what nvmlInit says; ``without`` are functions that the driver does not have;
    ``lost`` is the number of a GPU that answers nothing.
    """

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = NVML_ERROR_NOT_SUPPORTED
    NVML_ERROR_NOT_FOUND = NVML_ERROR_NOT_FOUND
    NVML_ERROR_LIBRARY_NOT_FOUND = NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_FUNCTION_NOT_FOUND = NVML_ERROR_FUNCTION_NOT_FOUND
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, gpus=(), *, fails=None, without=(), lost=None):
        self.gpus = gpus
        self.fails = fails
        self.without = without
        self.lost = lost
        self.opened = 0

    def _need(self, name):
        if not self.opened:
            raise AssertionError(f"{name} before nvmlInit")
        if name in self.without:
            raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlInit(self):
        if self.fails is not None:
            raise NVMLError(self.fails)
        self.opened += 1

    def nvmlShutdown(self):
        self._need("nvmlShutdown")
        self.opened -= 1

    def nvmlDeviceGetCount(self):
        self._need("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self._need("nvmlDeviceGetHandleByIndex")
        if index == self.lost:
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetName(self, handle):
        return handle.name.encode()

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle.memory is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=handle.memory)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return list(handle.capability)

    def nvmlDeviceGetMigMode(self, handle):
        self._need("nvmlDeviceGetMigMode")
        if handle.capability < (8, 0):
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return [int(handle.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return len(handle.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place):
        if handle.slices[place] is None:
            raise NVMLError(NVML_ERROR_NOT_FOUND)
        return handle.slices[place]
