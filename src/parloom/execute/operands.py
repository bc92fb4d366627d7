"""An operator's code, and tensors to call it on, apart from the program that it is in."""

from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom import runtime as rt
from parloom.codegen.source import expression, identifier
from parloom.ir.adjacent import operands_at
from parloom.ir.graph import DTYPE_BYTES
from parloom.ir.layout import local_shape
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG, Compute, PValue


def operator_call(pcg: PCG, item: Compute) -> Callable[..., Any]:
    """A function of a context, a prefix, and each operand of another name."""
    names = dict.fromkeys(identifier(v.name) for v in item.operands)
    code = f"lambda ctx, prefix, {', '.join(names)}: {expression(pcg, item, None)}"
    made: Callable[..., Any] = eval(code, {"torch": torch, "F": F, "rt": rt, "Tensor": Tensor})
    return made


def local_shape_of(value: PValue, mesh: Mesh) -> tuple[int, ...]:
    """One rank's, border rows included."""
    shape = list(local_shape(value.layout, value.spec.shape, mesh))
    for dim, below, above in value.halo:
        shape[dim] += below + above
    return tuple(shape)


def local_bytes_of(value: PValue, mesh: Mesh) -> int:
    """Bytes of one rank's, border rows included."""
    return prod(local_shape_of(value, mesh)) * DTYPE_BYTES[value.spec.dtype]


def random_operands(
    item: Compute, mesh: Mesh, device: torch.device, names: Collection[str]
) -> dict[str, Tensor]:
    """Operands of these names; those that are read as one where they lie are in one memory."""
    values = {v.name: v for v in item.operands}
    made = {
        n: random_value(v, values.values(), mesh, device) for n, v in values.items() if n in names
    }
    for position in item.adjacent:
        parts = [item.operands[i].name for i in operands_at(item.node, position)]
        if not made.keys() >= set(parts):
            continue
        rows = [len(made[name]) for name in parts]
        memory = torch.cat([made[name].detach() for name in parts])
        for name, part in zip(parts, torch.split(memory, rows), strict=True):
            made[name] = part.detach().requires_grad_(made[name].requires_grad)
    return made


def random_value(
    value: PValue, beside: Iterable[PValue], mesh: Mesh, device: torch.device
) -> Tensor:
    """Numbers between 0.5 and 1.5, which every operator takes; indices into the smallest dim."""
    shape, dtype = local_shape_of(value, mesh), getattr(torch, value.spec.dtype)
    if value.spec.is_float:
        made = torch.rand(shape, device=device).add_(0.5).to(dtype)
        return made.requires_grad_(value.differentiable)
    if dtype == torch.bool:
        return torch.rand(shape, device=device) > 0.5
    dims = [n for v in beside if v.spec.is_float for n in local_shape_of(v, mesh)]
    return torch.randint(0, max(1, min(dims, default=2)), shape, device=device).to(dtype)


def not_measured(item: Compute, error: Exception) -> str:
    """What to say of an operator that cannot be run alone."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return f"not measured: {item.node.key}: {reason}"
