"""What platforms of accelerators share, in no vendor's words: the port to a device with streams,
graphs and memory pools, the worker that measures and sleeps, and the runner.

A plugin subclasses :class:`~hardpoint_runtime.accelerator.worker.AcceleratorWorker` and
:class:`~hardpoint_runtime.accelerator.device.AcceleratorDeviceOps`. Nothing is imported here:
:mod:`hardpoint_runtime.accelerator.start_safety` serves platforms, which never import torch.
"""
