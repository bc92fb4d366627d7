"""What attention means, below what a trace makes of it.

Model libraries build masks from `arange` when they are traced, though outside of a trace they ask
for `is_causal` and no mask. A mask that depends on no input is evaluated; if it is exactly the
lower triangle, or true everywhere, attention can say so itself. With the mask goes the repetition
of grouped key and value heads, which the same libraries leave to attention where there is no mask.

That is what the untraced model computes, to the bit; it lets a device use its fast attention and
leaves dozens of operators dead.
"""

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

CAUSAL = "causal"
NOTHING = "nothing"
# A mask of one gigabyte: batch 16 at 8192 positions. Larger ones are kept as they are.
MAX_MASK_ELEMENTS = 1 << 30


def mask_meaning(mask: fx.Node, known: dict[fx.Node, Any]) -> str | None:
    """`causal`, `nothing` (masks nothing out), or None for any other mask.

    `known` keeps what has been evaluated, for the next mask of the same graph.
    """
    spec = mask.meta.get("val")
    if not isinstance(spec, Tensor) or spec.dtype != torch.bool or spec.dim() < 2:
        return None
    if spec.numel() > MAX_MASK_ELEMENTS or not is_fixed(mask):
        return None
    with torch.no_grad(), torch.device("cpu"):
        value = evaluate_fixed(mask, known)
        if bool(value.all()):
            return NOTHING
        rows, columns = value.shape[-2:]
        if rows == columns and bool(
            (value == torch.ones(rows, columns, dtype=torch.bool).tril()).all()
        ):
            return CAUSAL
    return None


def is_fixed(node: fx.Node) -> bool:
    """Whether a value depends on no input and no random number."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        target = current.target
        if current.op != "call_function":
            return False
        if isinstance(target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in target.tags:
                return False
        elif target is not getitem:
            return False
        pending.extend(current.all_input_nodes)
    return True


def evaluate_fixed(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node that depends on no input, on the CPU."""
    pending = [node]
    while pending:
        current = pending[-1]
        missing = [n for n in current.all_input_nodes if n not in known]
        if current in known or not missing:
            pending.pop()
            if current not in known:
                known[current] = run(current, known)
        else:
            pending.extend(missing)
    return known[node]


def run(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Call a node's operator on known values."""
    args = fx.node.map_arg(node.args, known.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, known.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    target: Any = node.target
    return target(*args, **kwargs)


def grouped_source(node: fx.Node) -> fx.Node | None:
    """The key or value [b, g, t, d] that a node repeats to [b, g * r, t, d], head by head."""
    view = node
    if packet(view) not in ("view", "_unsafe_view", "reshape"):
        return None
    (expand,) = view.all_input_nodes
    if packet(expand) == "clone":
        (expand,) = expand.all_input_nodes
    if packet(expand) != "expand":
        return None
    (unsqueeze,) = expand.all_input_nodes
    if packet(unsqueeze) != "unsqueeze" or unsqueeze.args[1] != 2:
        return None
    (source,) = unsqueeze.all_input_nodes
    before, between, after = (shape_of(n) for n in (source, expand, view))
    if len(before) != 4 or len(between) != 5:
        return None
    batch, groups, length, width = before
    repeated = (batch, groups * between[2], length, width)
    same = between == (batch, groups, between[2], length, width) and after == repeated
    return source if same else None


def packet(node: fx.Node) -> str:
    """The name of a node's ATen operator, ``""`` for other nodes."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return target._schema.name.removeprefix("aten::")


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, Tensor) else ()
