"""Loading a model's weights packed: which matrices are, where their bytes lie, and filling them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from hardpoint.errors import UnsupportedError
from torch import Tensor, nn

from hardpoint_runtime.loading.model_loading import check_weights, pour
from hardpoint_runtime.quantization.method import Packed, Piece, Place, Quantization
from hardpoint_runtime.quantization.packed_form import StoredRows, form_of

if TYPE_CHECKING:
    from hardpoint_runtime.loading.weights import Weights
    from hardpoint_runtime.models.language_model import LanguageModel
    from hardpoint_runtime.models.layers import Slot

PACKABLE = "packable"
"""The attribute of a module's class: names of its parameters that may be held packed."""
_ALIKE = "packed_alike"
"""The attribute of a module's class: true where each of those is packed as one part, if at all."""


def load_packed(
    model: LanguageModel,
    weights: Weights,
    quantization: Quantization,
    dtype: torch.dtype,
    cancelled: Callable[[], bool] = lambda: False,
) -> int:
    """Load every weight, those that ``quantization`` wants packed; return the bytes that were read.

    Called in the worker, for a model whose parameters have memory that nothing was written to.
    Raises as :func:`hardpoint_runtime.loading.load_into`, and UnsupportedError where nothing of a
    model can be packed although ``quantization`` is set.
    """
    expected = check_weights(model, weights)
    plan = plan_packing(model, weights, quantization)
    if not plan and quantization.config.model.quantization is not None:
        raise UnsupportedError(
            f"quantization = {quantization.config.model.quantization!r}",
            f"the model {type(model).__name__}",
            reason="none of its matrices can be packed",
            hint="Leave the key out.",
        )
    done = frozenset(quantization.hold(plan, weights))
    names = [name for name in expected if name not in done]
    given = pour(model, stream(model, weights, dtype, names), cancelled)
    quantization.loaded(plan)
    return given


def plan_packing(
    model: LanguageModel, weights: Weights, quantization: Quantization
) -> tuple[Packed, ...]:
    """Return what will be held packed, in the order of the model; nothing is changed yet."""
    slots: dict[tuple[int, str], dict[str, Slot]] = {}
    for name, slot in model.weight_slots().items():
        slots.setdefault((id(slot.module), slot.parameter), {})[name] = slot
    found = []
    for path, module in model.named_modules():
        for parameter in getattr(type(module), PACKABLE, ()):
            own = slots.get((id(module), parameter))
            if own is None:
                continue
            form = quantization.create(_place(path, parameter, module, own, weights))
            if form is not None:
                found.append(
                    Packed(
                        name=f"{path}.{parameter}",
                        module=module,
                        parameter=parameter,
                        form=form,
                        weights={
                            name: f"{slot.start} {slot.held} {slot.runs}"
                            for name, slot in own.items()
                        },
                    )
                )
    return tuple(found)


def _place(
    path: str, parameter: str, module: nn.Module, slots: Mapping[str, Slot], weights: Weights
) -> Place:
    rows, cols = module.get_parameter(parameter).shape
    pieces = [
        Piece(
            first=slot.start,
            rows=len(slot.view()),
            stored=weights.stored_type(name),
            whole=slot.shape[1] == cols,
        )
        for name, slot in slots.items()
    ]
    pieces.sort(key=lambda piece: piece.first)
    return Place(
        module=path, parameter=parameter, rows=rows, cols=cols, pieces=tuple(pieces),
        alike=getattr(type(module), _ALIKE, False),
    )  # fmt: skip


def stream(
    model: LanguageModel, weights: Weights, dtype: torch.dtype, names: list[str]
) -> Iterator[tuple[str, Tensor | StoredRows]]:
    """Yield the named weights: as they are stored where they are held so, else as numbers."""
    slots = model.weight_slots()
    for name in names:
        slot = slots[name]
        form = form_of(slot.module, slot.parameter)
        kept = form is not None and form.takes_stored(slot.start, weights.stored_type(name))
        yield name, weights.read_stored(name) if kept else weights.read(name, dtype)
