"""What an operator of a trace is called, and what it writes to."""

import torch
from torch import fx


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.is_write:
            given = node.args[position : position + 1] or (node.kwargs.get(argument.name),)
            fx.node.map_arg(given, found.append)
    return found


def packet_of(node: fx.Node) -> str:
    """`add_` for `aten.add_.Tensor`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return str(node.target)
