"""Decisions for the evaluation program: the training plan's, where the two programs are alike.

The plan decides about the operators of the training program. Evaluation lacks some of them
(dropout), has others (batch norm by running statistics), and cuts dims into factors of its own. An
operator that both have keeps its layouts; any other takes its operands as they lie, parameters as
they are stored. So there is an assignment whatever the plan is.
"""

from collections.abc import Mapping
from dataclasses import replace

from parloom.ir.factors import Factored, follow
from parloom.ir.graph import Graph, TensorSpec
from parloom.ir.layout import Layout
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.search.spread import Assignment, Unfolded, decisions, spread, unfold

Like = tuple[str, tuple[TensorSpec, ...]]  # an operator with the specs of operands and results


def evaluation_decisions(
    graph: Graph, factored: Factored, training: PCG, trained: Factored, num_microbatches: int
) -> Decisions:
    """A legal assignment for every operator of the evaluation program `graph`, which computes so
    many microbatches one after the other.
    """
    mesh = training.decisions.mesh
    before = unfold(training.graph, trained, mesh)
    known = {node.key: dict(node.factors) for node in training.decisions.nodes}
    assigned = [known.get(flat.key, {}) for flat in before.nodes]
    position = {flat.key: index for index, flat in enumerate(before.nodes)}
    program = unfold(graph, factored, mesh)

    def choose(index: int, followed: Assignment, layouts: Mapping[str, Layout]) -> Assignment:
        found = position.get(program.nodes[index].key)
        if found is None or _like(before, found) != _like(program, index):
            return followed
        return _as_laid_out(before, found, assigned[found], program.rules[index])

    assignments = spread(program, _seeds(graph, training, before, assigned), choose)
    nodes = decisions(program, assignments)
    return replace(training.decisions, nodes=nodes, num_microbatches=num_microbatches)


def _like(program: Unfolded, index: int) -> Like:
    flat = program.nodes[index]
    return flat.node.op, tuple(program.specs[n] for n in (*flat.operands, *flat.results))


def _as_laid_out(program: Unfolded, index: int, assignment: Assignment, rule: Rule) -> Assignment:
    """`assignment` of an operator in terms of another rule of it, cut into other factors."""
    own, mesh = program.rules[index], program.mesh
    operands = (own.operand_layout(i, assignment, mesh) for i in range(len(own.operands)))
    results = (own.result_layout(i, assignment, mesh) for i in range(len(own.results)))
    tensors = replace(rule, operands=(*rule.operands, *rule.results), results=())
    return follow(tensors, (*operands, *results), mesh)


def _seeds(
    graph: Graph, training: PCG, before: Unfolded, assigned: list[Assignment]
) -> dict[str, Layout]:
    """Layouts of inputs: parameters at home, batch tensors as training reads them first."""
    found = {("parameter", p.input.target): p.layout for p in training.parameters}
    for entry in training.graph.of_kind("batch"):
        for index in before.readers.get(entry.value.name, ())[:1]:
            operand = before.nodes[index].operands.index(entry.value.name)
            layout = before.rules[index].operand_layout(operand, assigned[index], before.mesh)
            count = 1 if entry.samples is None else training.num_microbatches
            # Of a microbatch's samples; here there are those of all of them.
            found["batch", entry.target] = Layout(tuple(
                replace(s, stride=s.stride * count) if s.dim == entry.samples else s
                for s in layout.shards
            ))  # fmt: skip
    return {
        i.value.name: found[i.kind, i.target] for i in graph.inputs if (i.kind, i.target) in found
    }
