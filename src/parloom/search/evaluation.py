"""Decisions for another program of a plan, as evaluation: its own, where the programs are alike.

The plan decides about the operators of one program. Evaluation lacks some of them (dropout), has
others (batch norm by running statistics), and cuts dims into factors of its own; the program of a
prompt has as many positions as that, where the decoding one has one. An operator that both have
keeps its layouts, where the dims that they shard are as long; any other takes its operands as they
lie, parameters as they are stored and caches as they are. So there is an assignment whatever the
plan is.
"""

from collections.abc import Mapping
from dataclasses import replace

from parloom.ir.factors import Factored, follow
from parloom.ir.graph import CACHE, Graph
from parloom.ir.layout import Layout
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, TIME
from parloom.ir.plan import Decisions
from parloom.search.spread import Assignment, Unfolded, decisions, spread, unfold


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
        if found is None or not _alike(before, found, assigned[found], program, index):
            return followed
        return _as_laid_out(before, found, assigned[found], program.rules[index])

    assignments = spread(program, _seeds(graph, training, before, assigned), choose)
    nodes = decisions(program, assignments)
    return replace(training.decisions, nodes=nodes, num_microbatches=num_microbatches)


def _alike(
    before: Unfolded, found: int, assignment: Assignment, program: Unfolded, index: int
) -> bool:
    """Whether two operators have tensors of as many dims, as long where an assignment shards them.

    A view whose shape differs anywhere cuts its dims in other places.
    """
    one, other = before.nodes[found], program.nodes[index]
    names = (*one.operands, *one.results), (*other.operands, *other.results)
    if one.node.op != other.node.op or len(names[0]) != len(names[1]):
        return False
    pairs = [(before.specs[a].shape, program.specs[b].shape) for a, b in zip(*names, strict=True)]
    if one.node.op == "view":
        return all(a == b for a, b in pairs)
    rule = before.rules[found]
    for (mine, its), dims in zip(pairs, (*rule.operands, *rule.results), strict=True):
        if len(mine) != len(its):
            return False
        for size, length, factors in zip(mine, its, dims, strict=True):
            if size != length and any(assignment.get(factor) for factor in factors):
                return False
    return True


def _as_laid_out(program: Unfolded, index: int, assignment: Assignment, rule: Rule) -> Assignment:
    """`assignment` of an operator in terms of another rule of it, cut into other factors."""
    own, mesh = program.rules[index], program.mesh
    operands = (own.operand_layout(i, assignment, mesh) for i in range(len(own.operands)))
    results = (own.result_layout(i, assignment, mesh) for i in range(len(own.results)))
    tensors = replace(rule, operands=(*rule.operands, *rule.results), results=())
    return follow(tensors, (*operands, *results), mesh)


def _of_all_samples(layout: Layout, count: int) -> Layout:
    """The layout that a whole batch has where each of so many microbatches has this one."""
    time = layout.shard(TIME)
    if time is None:
        return layout
    shards = (s for s in layout.shards if s.axis != TIME)
    return Layout(
        tuple(replace(s, stride=s.stride * count) if s.dim == time.dim else s for s in shards)
    )


def _seeds(
    graph: Graph, training: PCG, before: Unfolded, assigned: list[Assignment]
) -> dict[str, Layout]:
    """Layouts of inputs: parameters at home, batch tensors as training reads them first."""
    found = {("parameter", p.input.target): p.layout for p in training.parameters}
    inputs = zip(training.graph.inputs, training.main.inputs, strict=True)
    found |= {
        (CACHE, e.target): _of_all_samples(value.layout, training.num_microbatches)
        for e, value in inputs
        if e.kind == CACHE
    }
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
