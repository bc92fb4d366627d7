"""The tensors of a model and batch: a name for them, and how they are not as planned."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from parloom.capture.translate import dtype_name
from parloom.ir.graph import Graph, Input

CASTS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "double",
        torch.float32: "float",
        torch.float16: "half",
        torch.bfloat16: "bfloat16",
    }
)


def fingerprint(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """16 hex digits of a SHA-256 over parameters, buffers and batch.

    They count by name, shape, dtype and requires_grad, not by value. It names a model in messages;
    whether a model is the planned one is decided by its captured program (`capture.compare`).
    """
    parts = [
        [
            ["parameter", *described(n, p)]
            for n, p in model.named_parameters(remove_duplicate=False)
        ],
        [["buffer", *described(n, b)] for n, b in model.named_buffers(remove_duplicate=False)],
        [["batch", *described(n, t)] for n, t in sorted(batch.items())],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def described(name: str, tensor: Tensor) -> list[object]:
    """What of a tensor a plan depends on."""
    return [name, list(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad]


def differences(
    model: nn.Module, graph: Graph, batch: Mapping[str, Tensor] = MappingProxyType({})
) -> str:
    """What of a model's tensors, and of a batch where one is given, is not as in a planned graph.

    Empty where nothing is; whether a trainable parameter gets a gradient is not looked at.
    """
    kinds: dict[str, dict[str, Tensor]] = {
        "parameter": dict(model.named_parameters()),
        "buffer": dict(model.named_buffers()),
        "batch tensor": dict(batch),
    }
    known = {name for i in graph.inputs for name in (i.target, *i.aliases)}
    parts: list[str] = []
    for kind, own in kinds.items():
        planned = {i.target: i for i in graph.of_kind(kind.split(" ")[0])}
        if kind == "batch tensor" and not batch:
            continue
        differ = [(n, difference(own.get(n), i)) for n, i in planned.items()]
        told = [f"{n} ({what})" for n, what in differ if what]
        if told:
            parts.append(f"{len(told)} of {len(planned)} {kind}s differ: {some(told)}")
        new = [n for n in own if n not in known]
        if new:
            parts.append(f"{len(new)} {kind}s are not in the plan: {some(new)}")
    return "; ".join(parts)


def cast_needed(model: nn.Module, graph: Graph) -> str:
    """The line that casts a model whose tensors are as planned but in their dtypes, or nothing."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    planned = {i.target: i for k in ("parameter", "buffer") for i in graph.of_kind(k)}
    if own.keys() != planned.keys():
        return ""
    dtypes = {name: getattr(torch, i.value.spec.dtype) for name, i in planned.items()}
    if any(difference(_cast(own[n], dtypes[n]), i) for n, i in planned.items()):
        return ""
    saved = model.state_dict().keys()
    wanted = {d for n, d in dtypes.items() if d.is_floating_point and n in saved}
    if len(wanted) != 1:
        return ""
    (dtype,) = wanted
    tables = {n: d for n, d in dtypes.items() if d.is_floating_point and d != dtype}
    if not tables:
        mixed = any(t.is_complex() for t in own.values())  # `to` would make them real
        return f"cast it: model.{CASTS[dtype]}()" if mixed else f"cast it: model.to({dtype})"
    built = "build it again, and " if any(own[n].dtype != d for n, d in tables.items()) else ""
    return (
        f"{built}cast all but computed tables ({some(list(tables))}): for t in"
        f" model.state_dict(keep_vars=True).values(): t.data = t.data.to({dtype})"
        " if t.is_floating_point() else t.data"
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as it would be in a dtype, without values."""
    both = tensor.is_floating_point() and dtype.is_floating_point
    empty = torch.empty_like(tensor, dtype=dtype if both else None, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def difference(tensor: Tensor | None, planned: Input) -> str:
    """How a tensor is not as planned; empty where it is."""
    if tensor is None:
        return "missing"
    spec, found = planned.value.spec, []
    if tuple(tensor.shape) != spec.shape:
        found.append(f"{tuple(tensor.shape)}, planned {spec.shape}")
    if dtype_name(tensor.dtype) != spec.dtype:
        found.append(f"{dtype_name(tensor.dtype)}, planned {spec.dtype}")
    if planned.trainable and not tensor.requires_grad:
        found.append("frozen, planned trainable")
    return "; ".join(found)


def some(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
