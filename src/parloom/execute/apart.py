"""Which outputs of a pass are made of several samples together, though they have a dim of samples.

Samples are followed through the program as if each lay on a rank of its own: what these ranks would
have to tell each other, or to add up, is of all samples, and so is all that reads it.
"""

from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.ops.rule import OFFSET
from parloom.ir.samples import sample_dims
from parloom.search.spread import followed, record, unfold

AXIS = "sample"
EACH_BY_ITSELF = ("parloom.experts",)
"""Operators that send samples to each other's ranks, and give each what it has alone."""
REPLICATED = Layout()


def together(graph: Graph) -> frozenset[str]:
    """The names of the outputs that are of several samples together."""
    factored = factorize(graph)
    dims, entries = sample_dims(factored), graph.of_kind("batch")
    size = entries[0].value.spec.shape[0]
    mesh = Mesh((MeshAxis(AXIS, (), size),))
    layouts = {}
    for entry in entries:
        dim = dims.get(entry.target)
        if dim is not None:
            step = entry.value.spec.shape[dim] // size
            layouts[entry.value.name] = Layout((Shard(AXIS, dim, step),))
    program = unfold(graph, factored, mesh)
    found: set[str] = set()
    for index, (flat, rule) in enumerate(zip(program.nodes, program.rules, strict=True)):
        assignment = followed(program, index, layouts)
        record(program, index, assignment, layouts)
        moved = any(
            lies != program.operand_layout(index, position, assignment)
            for position, name in enumerate(flat.operands)
            if (lies := layouts.get(name, REPLICATED)).shards
        )
        added = any(
            rule.result_layout(position, assignment, mesh).partial_axes
            for position in range(len(flat.results))
        )
        told = any(rule.kind(factor) not in ("plain", OFFSET) for factor in assignment)
        if flat.node.op in EACH_BY_ITSELF:
            told = added = False
        if moved or added or told or not found.isdisjoint(flat.operands):
            found.update(flat.results)
    return frozenset(name for name, value in graph.outputs if value in found)
