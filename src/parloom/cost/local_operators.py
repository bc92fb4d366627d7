"""Operators of a lowered program as one rank runs them."""

from collections.abc import Iterator

from parloom.cost.kernels import ATTENTION, Blocks, LocalOperator
from parloom.ir.adjacent import operands_at
from parloom.ir.graph import Ref, TensorSpec
from parloom.ir.layout import local_shape
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Site, op_of
from parloom.ir.ops.attention import blocks_met
from parloom.ir.ops.joined import CONVS, LINEARS, WEIGHTS
from parloom.ir.pcg import Compute, PValue
from parloom.ir.remake import saved_by


def local_operator(item: Compute, mesh: Mesh) -> LocalOperator:
    """An operator of a lowered program as one rank of `mesh` runs it, border rows included."""
    op = op_of(item.node)
    site = Site(item.node, tuple(v.spec for v in item.operands))
    axes = item.rule.split_axes(dict(item.assignment))
    saved = saved_by(item)
    if item.node.op in (LINEARS, CONVS):
        return _one_product(item, mesh)
    arguments = (*item.node.args, *(v for _, v in item.node.kwargs))
    return LocalOperator(
        item.node.op,
        tuple(_local(v, mesh) for v in item.operands),
        tuple(_local(v, mesh) for v in item.results),
        tuple(a for a in arguments if not isinstance(a, Ref)),
        blocks_of(item, site, mesh),
        item.node.op == ATTENTION and bool(site.arg(4, "dropout_p", 0.0)),
        op.flops(site, item.rule) / mesh.size(axes),
        op.backward_ratio,
        tuple(i for i, v in enumerate(item.operands) if v.differentiable)
        if any(v.differentiable for v in item.results)
        else (),
        tuple(i for what, i in saved if what == "operand"),
        tuple(i for what, i in saved if what == "result"),
    )


def _one_product(item: Compute, mesh: Mesh) -> LocalOperator:
    """Several products of one operand as one with all of their rows."""
    x, *others = (_local(v, mesh) for v in item.operands)
    outs = [_local(v, mesh) for v in item.results]
    count, axes = len(outs), {a for _, assigned in item.assignment for a in assigned}
    channels = 1 - len(others[0].shape)  # the dim of an output that has the rows, from the last
    rows = sum(out.shape[channels] for out in outs)
    made = list(outs[0].shape)
    made[channels] = rows
    weight = TensorSpec((rows, *others[0].shape[1:]), others[0].dtype)
    bias = [TensorSpec((rows,), others[0].dtype)] if len(others) > count else []
    site = Site(item.node, tuple(v.spec for v in item.operands))
    wanted = [v.differentiable for v in item.operands]
    first, *trained = wanted[: 1 + count]
    flags = (first, any(trained), *([any(wanted[1 + count :])] if bias else []))
    return LocalOperator(
        item.node.op,
        (x, weight, *bias),
        (TensorSpec(tuple(made), outs[0].dtype),),
        flops=op_of(item.node).flops(site, item.rule) / mesh.size(tuple(sorted(axes))),
        backward_ratio=2.0,
        wanted=tuple(i for i, flag in enumerate(flags) if flag),
        kept_operands=(0, 1),
        in_place=WEIGHTS in item.adjacent,
    )


def kept_copies(item: Compute) -> Iterator[PValue]:
    """The operands of which an operator keeps a copy: it reads them as one, and they do not lie so.

    They are kept for the gradient of the operand that they multiply.
    """
    saved = saved_by(item) if item.operands[0].differentiable else ()
    for position in op_of(item.node).joins:
        if position not in item.adjacent:
            at = operands_at(item.node, position)
            yield from (item.operands[i] for i in at if ("operand", i) in saved)


def made_beside(item: Compute) -> Iterator[PValue]:
    """The operands whose gradients are made with those of others that are read as one with them,
    and that nobody asks for.
    """
    for position in op_of(item.node).joins:
        values = [item.operands[i] for i in operands_at(item.node, position)]
        if any(value.differentiable for value in values):
            yield from (value for value in values if not value.differentiable)


def blocks_of(item: Compute, site: Site, mesh: Mesh) -> Blocks:
    """What an operator of a lowered program computes of its scores, if it is attention."""
    if item.node.op != ATTENTION:
        return Blocks()
    chosen = dict(item.assignment)
    around = mesh.size(item.rule.routed(chosen, mesh))
    return Blocks(*blocks_met(site, item.rule, chosen, mesh), around)


def _local(value: PValue, mesh: Mesh) -> TensorSpec:
    shape = list(local_shape(value.layout, value.spec.shape, mesh))
    for dim, below, above in value.halo:
        shape[dim] += below + above
    return TensorSpec(tuple(shape), value.spec.dtype)
