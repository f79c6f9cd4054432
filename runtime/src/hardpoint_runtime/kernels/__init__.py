"""Kernels in Triton for accelerators: each does what a torch operation of the runtime does.

They are offered as named operations (:mod:`hardpoint_runtime.kernels.offers`), so that a worker
takes them where they can serve, and torch's else. Triton is optional: only the modules with kernels
import it. What Triton compiles has sizes that do not change in capitals; a *program* is one of the
instances that a launch runs side by side.
"""
