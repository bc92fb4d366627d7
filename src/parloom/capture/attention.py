"""What attention means, below what a trace makes of it.

Model libraries build masks from `arange` when they are traced, though outside of a trace they ask
for `is_causal` and no mask. A mask that depends on no input is evaluated; if it is exactly the
lower triangle, or true everywhere, attention can say so itself. With the mask goes the repetition
of grouped key and value heads, which the same libraries leave to attention where there is no mask.

That is what the untraced model computes, to the bit; it lets a device use its fast attention and
leaves dozens of operators dead.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from operator import getitem
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

CAUSAL = "causal"
NOTHING = "nothing"
# One gigabyte, a mask of 32768 positions for all samples alike. Larger ones are kept as they are.
MAX_ELEMENTS = 1 << 30
LOOKED_THROUGH = 1 << 24  # elements up to which a value is looked through for dims it repeats along
# Elementwise without torch's tag.
ELEMENTWISE = frozenset({"__and__", "__or__", "__xor__", "_to_copy", "clone"})
# Of one dim, the same for all places along the others; with the position of that dim.
ALONG_DIM: Mapping[str, int] = MappingProxyType({"cumsum": 1, "diff": 2})
# Of any strides, without a copy.
VIEWS = frozenset({
    "alias", "detach", "expand", "permute", "select", "slice", "squeeze", "t", "transpose",
    "unsqueeze",
})  # fmt: skip


class TooLarge(Exception):
    """A value that is not worth its memory."""


class FixedMasks:
    """What the masks of a graph mean; values that several depend on are evaluated once."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.meanings: dict[fx.Node, str | None] = {}

    def meaning(self, mask: fx.Node) -> str | None:
        """`causal`, `nothing` (masks nothing out), or None for any other mask."""
        if mask not in self.meanings:
            self.meanings[mask] = mask_meaning(mask, self.values)
            for node, value in tuple(self.values.items()):
                if isinstance(value, Tensor) and distinct(value).numel() > LOOKED_THROUGH:
                    del self.values[node]
        return self.meanings[mask]


def mask_meaning(mask: fx.Node, known: dict[fx.Node, Any]) -> str | None:
    """What one mask means; `known` is added to."""
    spec = mask.meta.get("val")
    if not isinstance(spec, Tensor) or spec.dtype != torch.bool or spec.dim() < 2:
        return None
    if not is_fixed(mask):
        return None
    rows, columns = spec.shape[-2:]
    with torch.no_grad(), torch.device("cpu"):
        try:
            value = distinct(evaluate_fixed(mask, known))
        except TooLarge:
            return None
        if bool(value.all()):
            return NOTHING
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
    """Call a node's operator on known values.

    What repeats along a dim, as most of a mask does along the samples, is held and computed once.
    Raises `TooLarge` for a result of more than `MAX_ELEMENTS`.
    """
    target: Any = node.target
    spec = node.meta.get("val")
    elementwise = is_elementwise(node)
    view = target is torch.ops.aten.view.default
    any_strides = view or packet(node) in VIEWS or is_lookup(node, known)
    plain: Callable[[Any], Any] = (
        distinct if elementwise else as_it_lies if any_strides else contiguous
    )
    if packet(node) in ALONG_DIM:
        plain = partial(without_repeats, dims=shared_repeats(node, known))
    args: Any = fx.node.map_arg(node.args, lambda n: plain(known[n]))
    if is_lookup(node, known):
        args = looked_up_once(*args)
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: plain(known[n]))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if not isinstance(spec, Tensor) or packet(node) in VIEWS:
        return target(*args, **kwargs)
    shape = tuple(spec.shape)
    if elementwise:
        operands = (distinct(known[n]).shape for n in node.all_input_nodes)
        shape = torch.broadcast_shapes(*operands)  # type: ignore[no-untyped-call]
    if prod(shape) > MAX_ELEMENTS:
        raise TooLarge
    if view:
        target = torch.ops.aten.reshape.default
    return repeated(target(*args, **kwargs)).expand(spec.shape)


def shared_repeats(node: fx.Node, known: Mapping[fx.Node, Any]) -> list[int]:
    """The dims along which all operands of a node repeat, but the one that it works along."""
    arguments: tuple[Any, ...] = node.args
    position = ALONG_DIM[packet(node)]
    rank = known[arguments[0]].dim()
    along = (arguments[position] if len(arguments) > position else -1) % rank
    operands = [known[n] for n in node.all_input_nodes]
    alike = all(t.dim() == rank for t in operands)
    return [
        dim
        for dim in range(rank)
        if alike and dim != along and all(t.stride(dim) == 0 for t in operands)
    ]


def without_repeats(value: Tensor, dims: list[int]) -> Tensor:
    """A tensor with size 1 in some dims along which it is expanded."""
    for dim in dims:
        value = value.narrow(dim, 0, 1)
    return value.contiguous()


def is_lookup(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether each element of a node's result is one of its first operand, at given indices."""
    if packet(node) != "index":
        return False
    arguments: tuple[Any, ...] = node.args
    source, indices = arguments
    given = [known[n] for n in indices if isinstance(n, fx.Node)]
    integers = all(t.dtype in (torch.int32, torch.int64) for t in given)
    return integers and len(given) == len(indices) == known[source].dim()


def looked_up_once(source: Tensor, indices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The operands of a lookup, read at 0 along the dims along which the source repeats."""
    first = torch.zeros((), dtype=torch.int64)
    repeats = [stride == 0 for stride in source.stride()]
    once = [first if r else distinct(i) for r, i in zip(repeats, indices, strict=True)]
    return distinct(source), once


def as_it_lies(value: Any) -> Any:
    """For operators that take any strides."""
    return value


def contiguous(value: Any) -> Any:
    """For those that may not."""
    return value.contiguous() if isinstance(value, Tensor) else value


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of a node's result comes from the elements of its operands there."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or packet(node) in ELEMENTWISE


def distinct(value: Any) -> Any:
    """A tensor without what it repeats: size 1 in the dims along which it is expanded."""
    if not isinstance(value, Tensor):
        return value
    for dim in range(value.dim()):
        if value.stride(dim) == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def repeated(value: Tensor) -> Tensor:
    """The same tensor, expanded along the dims where all its elements are equal."""
    shape = value.shape
    if value.is_floating_point() or value.is_complex() or value.numel() > LOOKED_THROUGH:
        return value  # zeros of both signs are equal, and not the same
    for dim, size in enumerate(shape):
        first = value.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((value == first).all()):
            value = first
    return value.expand(shape)


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


def looked_at(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that `grouped_source` looks at."""
    yield node
    while packet(node) in ("view", "_unsafe_view", "reshape", "clone", "expand", "unsqueeze"):
        node = node.all_input_nodes[0]
        yield node


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
