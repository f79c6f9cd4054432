"""The steps of ``gpu_check.sh`` that look at the device without an engine; what the driver's own
tools say, and whether Triton compiles.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from gpu_house import FailedError, House, SkippedError, same, so_far

MIB = 1 << 20


def pools(house: House) -> dict:
    """The driver's virtual memory call by call, then torch's allocations in a pool that sleeps."""
    import torch
    from hardpoint_runtime.accelerator.substitute import SubstituteDeviceOps

    so_far({"at": "torch is imported"})
    if house.dry:
        device = SubstituteDeviceOps(1, 8 << 30)
    else:
        from hardpoint_cuda.device import CudaDeviceOps

        device = CudaDeviceOps("cuda", 0)
        device.set_device()
        torch.zeros(1, device=device.device)
        so_far({"torch": torch.__version__, "device": torch.cuda.get_device_name(0)})
    said = _Said()
    logging.getLogger("hardpoint.worker").addHandler(said)
    try:
        so_far({"at": "loading the driver's library"})
        _remapped(device.make_virtual_memory() or device.pools.memory)
        _in_a_pool(device)
    except FailedError:
        raise
    except Exception as error:
        raise FailedError(f"{type(error).__name__}: {error}; {'; '.join(said.lines)}") from error
    return {"driver said": said.lines}


def _remapped(memory) -> None:
    import torch

    size = 2 * max(memory.granularity, 2 * MIB)
    values = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    so_far({"granularity": memory.granularity, "at": f"reserving {size} bytes"})
    address = memory.reserve(size)
    for turn in ("first", "again"):
        so_far({"at": f"mapping {size} bytes, {turn}"})
        memory.map(address, size)
        so_far({"at": f"writing, {turn}"})
        memory.write(address, values)
        so_far({"at": f"reading, {turn}"})
        seen = torch.zeros(size, dtype=torch.uint8)
        memory.read(address, seen)
        if not torch.equal(seen, values):
            raise FailedError(f"{turn}: other bytes were read than were written")
        so_far({"at": f"unmapping, {turn}"})
        memory.unmap(address, size)
    so_far({"at": "releasing"})
    memory.release(address, size)


def _in_a_pool(device) -> None:
    import torch

    so_far({"at": "allocating in a pool"})
    tensor = device.allocate(64 * MIB, "weights")
    with device.pool("weights"):
        zeros = torch.zeros(3, 5, device=device.device)
    tensor.fill_(7)
    zeros.add_(2)
    places, before = [tensor.data_ptr(), zeros.data_ptr()], device.memory_held()
    so_far({"at": "sleeping", "in the pool": device.pools.held()})
    report = device.pools.sleep(["weights"], keep=["weights"])
    told = {"freed": report.bytes_freed, "the driver's difference": before - device.memory_held()}
    so_far({"at": "waking", **told})
    device.pools.wake(["weights"])
    same([tensor.data_ptr(), zeros.data_ptr()], places, "addresses after waking")
    same(bool((tensor == 7).all()) and bool((zeros == 2).all()), True, "what was kept")
    so_far({"at": "giving back"})
    del tensor, zeros
    device.pools.close()
    device.empty_cache()
    so_far({"at": "the end", "left in the pool": device.pools.held()})


class _Said(logging.Handler):
    """What the pools log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def kernels(house: House) -> dict:
    """Each Triton kernel beside its torch operation, on the device."""
    if house.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import
    import gpu_kernels

    if faults := gpu_kernels.compare(house.dry):
        raise FailedError("; ".join(faults))
    return {}


def streams(house: House) -> dict:
    """Values on their way to the host are those of when they were asked for: not those before, by a
    copy that does not wait, nor later ones, by memory that is given away too early.
    """
    if house.dry:
        raise SkippedError("host memory has no streams")
    import torch
    from hardpoint_cuda.device import CudaDeviceOps

    device = CudaDeviceOps("cuda", 0)
    device.set_device()
    matrix = torch.randn(8192, 8192, device=device.device, dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    values = torch.zeros(1 << 20, dtype=torch.int64, device=device.device)
    torch.matmul(matrix, matrix, out=product)
    device.synchronize()
    so_far({"a copy that does not wait is seen": _unordered(matrix, product, values)})
    fetches = []
    for turn in range(24):
        torch.matmul(matrix, matrix, out=product)  # the values come late
        values.fill_(turn)
        source = values + 0
        fetches.append(device.fetch(source))
        del source
        torch.full_like(values, -1)  # in the place of the source, if it were free
    for turn, fetch in enumerate(fetches):
        same(fetch.wait().unique().tolist(), [turn], f"fetch {turn}")
    so_far({"fetches": len(fetches)})
    target = torch.zeros(1 << 18, dtype=torch.int64, device=device.device)
    torch.matmul(matrix, matrix, out=product)
    kept = []
    for turn in range(100):
        device.write(target, torch.full(target.shape, turn))
        kept.append(target[:: 1 << 10].clone())
    for turn, each in enumerate(kept):
        same(each.unique().tolist(), [turn], f"write {turn}")
    return {"writes": len(kept)}


def _unordered(matrix, product, values) -> bool:
    """Whether a copy on another stream, which waits for nothing, brings what was there before."""
    import torch

    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    other = torch.cuda.Stream()
    torch.matmul(matrix, matrix, out=product)
    values.fill_(77)
    with torch.cuda.stream(other):
        host.copy_(values, non_blocking=True)
    other.synchronize()
    seen = bool((host != 77).any())
    torch.cuda.synchronize()
    return seen


def collectives(house: House) -> dict:
    """The device's library for one rank over a file: a sum, the same captured, and an abort."""
    import torch
    from hardpoint_runtime.device import HostDeviceOps
    from hardpoint_runtime.parallel.communicator import Meeting
    from hardpoint_runtime.parallel.groups import Axis, Group

    if house.dry:
        device = HostDeviceOps("gloo")
    else:
        from hardpoint_cuda.device import CudaDeviceOps

        device = CudaDeviceOps("cuda", 0)
        device.set_device()
    with tempfile.NamedTemporaryFile() as file:
        meeting = Meeting(rank=0, rendezvous=f"file://{file.name}", timeout=8.0)
        so_far({"at": "meeting"})
        group = device.make_communicator(Group(axis=Axis.TENSOR, index=0, ranks=(0,)), meeting)
        try:
            so_far({"at": "a sum", "library": type(group).__name__})
            for dtype in (torch.float32, torch.bfloat16):
                given = torch.full((1 << 16,), 3, dtype=dtype, device=device.device)
                same(group.all_reduce(given).unique().tolist(), [3.0], f"sum in {dtype}")
            so_far({"at": "a captured sum"})
            if not house.dry:
                same(_captured(device, group), [[2.0], [10.0]], "captured sums")
            so_far({"at": "an abort"})
            group.end()
            same(float(torch.ones(8, device=device.device).sum()), 8.0, "a sum after the abort")
            so_far({"at": "closing"})
        finally:
            group.close()
    return {"at": "the end"}


def _captured(device, group) -> list:
    import torch

    given = torch.ones(1 << 16, device=device.device)
    graph = device.capture(lambda: group.all_reduce(given * 2), "sum")
    found = []
    for value in (1, 5):
        given.fill_(value)
        found.append(device.replay(graph).unique().tolist())
    return found


def driver_memory() -> dict:
    """Return what the driver's own tools say of torch's first device (``name``, and ``total`` and
    ``used`` in bytes), or the ``reason`` why they say nothing. Where they do not know it by its
    number, the only one that they see is meant.
    """
    import torch

    reasons = []
    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    for asked in (_by_command, _by_library):
        for device in (*([] if uuid is None else [f"GPU-{uuid}"]), None):
            try:
                return asked(device)
            except Exception as error:  # noqa: BLE001 - a machine without them is no fault of ours
                reasons.append(f"{type(error).__name__}: {error}")
    return {"reason": "; ".join(reasons)}


def _by_command(device: str | None) -> dict:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version",
               "--format=csv,noheader,nounits"]  # fmt: skip
    command += ["-i", device] if device else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"nvidia-smi: {(done.stdout + done.stderr)[-300:]}")
    (line,) = done.stdout.splitlines()
    name, total, used, version = line.split(", ")
    return {"name": name, "version": version, "total": int(total) * MIB, "used": int(used) * MIB}


def _by_library(device: str | None) -> dict:
    import pynvml

    pynvml.nvmlInit()
    try:
        if device:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device.encode())
        elif (count := pynvml.nvmlDeviceGetCount()) == 1:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        else:
            raise OSError(f"NVML sees {count} GPUs")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else name
        return {"name": name, "total": int(memory.total), "used": int(memory.used)}
    finally:
        pynvml.nvmlShutdown()


def triton_says() -> str:
    """Return Triton's version if it compiles a kernel and that runs, else what it lacks."""
    if importlib.util.find_spec("triton") is None:
        return "cannot compile: not installed"
    absent = []
    compilers = [os.environ.get("CC") or "", "cc", "gcc", "clang"]
    if not any(shutil.which(each) for each in compilers if each):
        absent.append("no C compiler (CC, cc, gcc or clang)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        absent.append(f"no {header.name} in the interpreter's include folder")
    try:
        import torch
        import triton
        from hardpoint_runtime.kernels import blocks

        plane = torch.ones(4, 8, device="cuda")
        blocks.zero_blocks([plane], torch.tensor([1, 2], device="cuda"))
        same(plane.sum().item(), 16.0, "zeroed blocks")
    except Exception as error:  # noqa: BLE001 - whatever it is is the answer
        reason = f"{type(error).__name__}: {error}"
        return f"cannot compile: {'; '.join([*absent, reason])}"[:1500]
    return json.dumps([triton.__version__, *absent])
