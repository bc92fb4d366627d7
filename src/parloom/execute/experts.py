"""The reference of `parloom.experts`: all rows on one device, an expert after another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from parloom.capture.operators import packet
from parloom.errors import VerifyError


def experts(
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    known: Tensor,
    tensors: list[Tensor],
    steps: list[Any],
    counts: list[int] | None = None,
) -> Tensor:
    """Every token through the experts of its slots, weighted and summed over the slots.

    `ids` and `weights` are [token, slot], `known` [expert]; `steps` are as `ir.ops.experts` defines
    them, as torch takes them. `counts` are the rows of each expert where `ids` have no values.

    Raises `VerifyError` for a step that makes other results than it declares.
    """
    slots = ids.shape[1]
    expert, order = ids.flatten().sort()
    if counts is None:
        counts = torch.bincount(expert, minlength=len(known)).tolist()
    last: Any = tokens[order // slots]
    values: dict[str, Any] = {f"${i}": tensor for i, tensor in enumerate(tensors)}
    values["$rows"] = last
    for op, args, kwargs, results in steps:
        given = [_argument(a, values) for a in args]
        if op == "parloom.grouped_mm":
            groups = zip(given[0].split(counts), given[1].unbind(), strict=True)
            made: Any = torch.cat([rows @ matrix for rows, matrix in groups])
        elif op == "parloom.expert_rows":
            made = given[0][expert]
        else:
            made = packet(op)(*given, **{name: _argument(v, values) for name, v in kwargs})
        made = made if isinstance(made, tuple | list) else [made]
        declared = [(dtype, tuple(shape)) for _, dtype, shape in results]
        if declared != [(m.dtype, tuple(m.shape)) for m in made]:
            raise VerifyError(f"step {op} of experts makes {made}, and declares {declared}")
        values |= {f"${name}": m for (name, _, _), m in zip(results, made, strict=True)}
        last = made[0]
    weighted = last * weights.flatten()[order].unsqueeze(-1)
    total: Tensor = weighted[order.argsort()].view(len(tokens), slots, -1).sum(1)
    return total


def _argument(arg: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, list):
        return [_argument(a, values) for a in arg]
    if not isinstance(arg, str) or not arg.startswith("$"):
        return arg
    if arg not in values:
        raise VerifyError(f"a step of experts reads {arg!r}, which is not there")
    return values[arg]
