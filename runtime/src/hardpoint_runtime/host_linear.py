"""A linear layer for host processors without matrix units, by number of rows and type of weight.

Plain torch leaves much on the table there (torch 2.13, two cores with AVX2, 576 x 3072 weights):

* float32, up to 64 rows: ``(weight @ x.T).T`` takes half to nine tenths of the time of
  ``x @ weight.T``, because the library threads over the many outputs instead of the few rows. It
  does not thread well over one row, nor over three: with one repeated they take a quarter less.
* bfloat16, more than a few rows: the library multiplies element by element at a seventh of the
  speed of float32. Widening a slab of the weight that fits the cache and multiplying in float32
  costs little more than float32 itself, and rounds once instead of often.

A platform plugin whose devices are host memory offers :func:`linear` as the operation ``linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit

FEW_ROWS = 96
"""Up to this many rows the weight is the left factor."""

NARROW_ROWS = 3
"""Up to this many rows the library's own kernels for 16-bit types are fast enough."""

SLAB = 2 << 20
"""Elements of a weight that are widened at once: 8 MiB of float32, a share of a last-level
cache.
"""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [T, N],
    contiguous, of the type of ``x``.

    Called by models in the worker, for every linear layer.
    """
    rows = x.shape[0]
    if weight.dtype == torch.float32:
        if rows > FEW_ROWS:
            return F.linear(x, weight, bias)
        out = _few_rows(x, weight)
    elif rows <= NARROW_ROWS:
        return F.linear(x, weight, bias)
    else:
        out = _widened(x, weight)
    out = out.to(x.dtype).contiguous()
    return out if bias is None else out.add_(bias)


def _few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return [T, N] with the weight as the left factor."""
    rows = x.shape[0]
    if rows in (1, 3):
        return torch.mm(weight, torch.cat((x, x[-1:])).t()).t()[:rows]
    return torch.mm(weight, x.t()).t()


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, N], computed in float32 slab by slab."""
    outputs, inputs = weight.shape
    columns = x.float().t()
    step = max(1, SLAB // inputs)
    if outputs <= step:
        return torch.mm(weight.float(), columns).t()
    out = columns.new_empty((outputs, columns.shape[1]))
    for start in range(0, outputs, step):
        torch.mm(weight[start : start + step].float(), columns, out=out[start : start + step])
    return out.t()
