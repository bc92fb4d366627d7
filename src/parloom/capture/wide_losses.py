"""Losses of float16 in float32, as torch.autocast computes them.

The gradient of a float16 loss is float16 too, where no loss scale above 65504 has a value, and sums
over a batch overflow. Only results without dims are widened: they promote no tensor that has some.
"""

from typing import Any

import torch
from torch import fx

from parloom.ir.ops.loss import OPS

aten = torch.ops.aten
LOSSES = frozenset(op.name for op in OPS) | {
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "nll_loss",
    "nll_loss2d", "poisson_nll_loss", "triplet_margin_loss",
}  # fmt: skip
SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)


def widen_losses(module: fx.GraphModule) -> None:
    """Cast the float16 operands of scalar losses, and give scalar sums a dtype to sum in.

    What depends on them has other dtypes when the graph is traced again.
    """
    for node in list(module.graph.nodes):
        made = node.meta.get("val")
        narrow = isinstance(made, torch.Tensor) and made.dtype == torch.float16 and not made.dim()
        if not narrow or not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, name = node.target._schema.name.split("::")
        if node.target in SUMS and not node.kwargs.get("dtype"):
            node.kwargs = node.kwargs | {"dtype": torch.float32}
        elif namespace == "aten" and name in LOSSES:
            _cast_operands(module, node)
    module.recompile()


def _cast_operands(module: fx.GraphModule, node: fx.Node) -> None:
    def cast(operand: Any) -> Any:
        given = operand.meta.get("val") if isinstance(operand, fx.Node) else None
        if not isinstance(given, torch.Tensor) or given.dtype != torch.float16:
            return operand
        wide = module.graph.call_function(
            aten._to_copy.default, (operand,), {"dtype": torch.float32}
        )
        wide.meta = node.meta | {"val": torch.empty_like(given, dtype=torch.float32)}
        return wide

    with module.graph.inserting_before(node):
        node.args = tuple(cast(operand) for operand in node.args)
        node.kwargs = {name: cast(operand) for name, operand in node.kwargs.items()}
