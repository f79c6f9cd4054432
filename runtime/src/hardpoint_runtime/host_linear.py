"""A linear layer for host processors without matrix units, by number of rows and type of weight.

Plain torch leaves much on the table there (torch 2.13, two cores with AVX2, 576 x 3072 weights):

* float32, up to 64 rows on several threads: ``(weight @ x.T).T`` takes half to nine tenths of the
  time of ``x @ weight.T``, because the library threads over the many outputs instead of the few
  rows. It does not thread well over one row, nor over three: with one repeated they take a quarter
  less. On one thread only two to four rows gain, and more lose.
* bfloat16, more than a few rows: the library multiplies element by element at a seventh of the
  speed of float32. Widening a slab of the weight that fits the cache and multiplying in float32
  costs little more than float32 itself, and rounds once instead of often.

A platform plugin whose devices are host memory offers :func:`linear` as the operation ``linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit

FEW_ROWS = 96
"""Up to this many rows the weight is the left factor, on several threads."""

FEWEST_ROWS = 4
"""The same, on one thread."""

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
    if weight.dtype == torch.float32:
        out = _product(x, weight)
    elif x.shape[0] <= NARROW_ROWS:
        return F.linear(x, weight, bias)
    else:
        out = _widened(x.float(), weight)
    out = out.to(x.dtype).contiguous()
    return out if bias is None else out.add_(bias)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, N] of float32 factors, in any layout."""
    rows = x.shape[0]
    several = torch.get_num_threads() > 1
    if rows > (FEW_ROWS if several else FEWEST_ROWS) or (rows == 1 and not several):
        return F.linear(x, weight)
    if rows in (1, 3):
        return torch.mm(weight, torch.cat((x, x[-1:])).t()).t()[:rows]
    return torch.mm(weight, x.t()).t()


def _widened(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return float32 [T, N] of a float32 and a narrow factor, slab by slab."""
    step = max(1, SLAB // weight.shape[1])
    slabs = [_product(x, slab.float()) for slab in torch.split(weight, step)]
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs, -1)
