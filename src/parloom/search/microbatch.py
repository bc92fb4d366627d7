"""The program of one microbatch: the same operators, flows and weights, with samples cut in time.

A microbatch is a mesh axis in time, outermost on the factor of the samples (`ir.lower`): so the
program of one has that factor divided by the number of microbatches, and every size that follows.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from parloom.ir.graph import Node, TensorSpec, Value
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.ops.rule import Dims, Rule
from parloom.ir.pcg import TIME
from parloom.ir.samples import SAMPLED, sample_dims
from parloom.search.program import Operator, Program
from parloom.search.spread import spread, unfold


def sample_factors(program: Program, num_microbatches: int) -> Mapping[int, str] | None:
    """The factor of samples of each operator (by index) that has one.

    None where calls of one operator differ in it, or where a batch does not divide.
    """
    mesh = Mesh((MeshAxis(TIME, (), num_microbatches),))
    seeds, dims = {}, sample_dims(program.factored)
    for entry in program.graph.inputs:
        if entry.kind not in SAMPLED or entry.target not in dims:
            continue
        dim, value = dims[entry.target], entry.value
        if value.spec.shape[dim] % num_microbatches:
            return None
        seeds[value.name] = Layout((Shard(TIME, dim, value.spec.shape[dim] // num_microbatches),))
    unfolded = unfold(program.graph, program.factored, mesh)
    found: dict[int, str] = {}
    for flat, assignment in zip(unfolded.nodes, spread(unfolded, seeds), strict=True):
        index = program.index.get(flat.key)
        factor = next(iter(assignment), "")
        if index is not None and found.setdefault(index, factor) != factor:
            return None
    return {index: factor for index, factor in found.items() if factor}


def microbatch_of(program: Program, num_microbatches: int) -> Program | None:
    """`program` for one of `num_microbatches`; None where samples cannot be cut so."""
    if num_microbatches == 1:
        return program
    factors = sample_factors(program, num_microbatches)
    if factors is None:
        return None
    cut = tuple(
        _cut(operator, factors.get(index), num_microbatches)
        for index, operator in enumerate(program.operators)
    )
    flows = []
    for flow in program.flows:
        spec = flow.spec
        if flow.operator >= 0:
            spec = cut[flow.operator].node.results[flow.result].spec
        elif flow.weight < 0 and flow.readers:
            reader = flow.readers[0]
            spec = cut[reader.operator].operands[reader.operand]
        flows.append(replace(flow, spec=spec))
    return replace(program, operators=cut, flows=tuple(flows))


def _cut(operator: Operator, factor: str | None, num_microbatches: int) -> Operator:
    """An operator whose `factor` is divided by `num_microbatches`."""
    if factor is None:
        return operator
    rule = operator.rule
    sizes = tuple((f, n // num_microbatches if f == factor else n) for f, n in rule.sizes)
    small = replace(rule, sizes=sizes)
    operands = zip(operator.operands, rule.operands, strict=True)
    results = tuple(
        Value(value.name, _sized(value.spec, dims, small))
        for value, dims in zip(operator.node.results, rule.results, strict=True)
    )
    node: Node = replace(operator.node, results=results)
    return replace(
        operator,
        node=node,
        rule=small,
        operands=tuple(_sized(spec, dims, small) for spec, dims in operands),
    )


def _sized(spec: TensorSpec, dims: Dims, rule: Rule) -> TensorSpec:
    """`spec` with the sizes that `rule` gives its factors."""
    shape = tuple(
        prod(rule.size(f) for f in factors) if factors else size
        for size, factors in zip(spec.shape, dims, strict=True)
    )
    return TensorSpec(shape, spec.dtype)
