"""Plans without a solver: data_parallel, fsdp, megatron and random legal ones.

They are the rules of thumb that a searched plan has to beat, so each is written as the field does
it: data parallelism over samples, ZeRO-3 storage (Rajbhandari et al., SC'20) on top of it, and
Megatron's column-then-row pairs (Shoeybi et al., 2019) found on the graph rather than by name.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod

from parloom.cost.kernels import ATTENTION
from parloom.errors import InputError
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis
from parloom.ir.ops import Rule
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage
from parloom.rewrite.pad import paddings
from parloom.rewrite.rewrites import rewritten
from parloom.search.spread import (
    Assignment,
    Unfolded,
    decisions,
    followed,
    record,
    spread,
    unfold,
)

WEIGHT_OPS = frozenset({"linear", "addmm", "mm", "conv1d", "conv2d", "conv3d", EXPERTS})
LOOKUPS = frozenset({"embedding", "parloom.embedding_bag"})
TENSOR = "tensor"
DATA = "data"

Method = Callable[[Graph, Cluster, int, int], Iterator[Decisions]]


def mesh_of(cluster: Cluster, tensor: int = 1) -> Mesh:
    """A mesh with `tensor` ranks on the fastest links and the data axis over the rest."""
    primes = list(cluster.prime_axes())
    inner: list[PrimeAxis] = []
    while prod(p.size for p in inner) < tensor:
        inner.append(primes.pop(0))
    if prod(p.size for p in inner) != tensor:
        raise InputError(f"{tensor} is no product of the fastest links of {cluster.name}")
    axes = []
    if primes or not inner:
        axes.append(MeshAxis(DATA, tuple(reversed(primes)) or (PrimeAxis(1, 1, 0),)))
    if inner:
        axes.append(MeshAxis(TENSOR, tuple(reversed(inner))))
    return Mesh(tuple(axes))


def batch_seeds(graph: Graph, mesh: Mesh, axis: str = DATA) -> dict[str, Layout]:
    """Batch tensors sharded on their first dim; raises `InputError` where it does not divide."""
    entries = graph.of_kind("batch")
    if axis not in mesh.names or mesh[axis].size == 1:
        return {}
    seeds = {}
    sizes = [e.value.spec.shape[0] for e in entries if e.value.spec.shape]
    ranks = mesh[axis].size
    for entry in entries:
        shape = entry.value.spec.shape
        if not shape or shape[0] != sizes[0]:
            continue
        if shape[0] % ranks and entry.samples is not None:
            raise InputError(
                f"a microbatch has {shape[0]} samples of {entry.target!r}, which do not divide over"
                f" {ranks} data-parallel ranks; give each a multiple of {ranks} of them"
                " (--microbatches, --batch)"
            )
        if shape[0] % ranks:
            near = max(ranks, round(shape[0] / ranks) * ranks)
            raise InputError(
                f"batch tensor {entry.target!r} has {shape[0]} samples, which do not divide over"
                f" {ranks} data-parallel ranks; take {near} of them: --batch {near}, or where a"
                " factory makes the batch, in the factory"
            )
        seeds[entry.value.name] = Layout((Shard(axis, 0, shape[0] // ranks),))
    return seeds


def data_parallel(
    graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """Every device has all weights and a share of the samples."""
    mesh = mesh_of(cluster)
    program = unfold(graph, factorize(graph), mesh)
    assignments = spread(program, batch_seeds(graph, mesh))
    yield Decisions(mesh, decisions(program, assignments), num_microbatches=num_microbatches)


def fsdp(
    graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """Data parallel with weights, gradients and optimizer states sharded (ZeRO-3)."""
    for plan in data_parallel(graph, cluster, num_microbatches):
        if plan.mesh.num_ranks == 1:
            yield plan
            continue
        storage = Storage((DATA,))
        parameters = tuple(
            ParameterDecision(i.target, storage, storage, storage)
            for i in graph.of_kind("parameter")
            if i.value.spec.shape
        )
        yield replace(plan, parameters=parameters)


def megatron(
    graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """Tensor parallel over the fastest links, data parallel over the rest: one plan per degree.

    Ends where a degree leaves heads whole that a smaller one splits (Megatron-LM refuses these).
    """
    if cluster.num_devices == 1:
        yield from data_parallel(graph, cluster, num_microbatches)
    factored = factorize(graph)
    degree, split = 1, frozenset[str]()
    for prime in cluster.prime_axes():
        degree *= prime.size
        mesh = mesh_of(cluster, degree)
        try:
            seeds = batch_seeds(graph, mesh)
        except InputError:
            if degree == cluster.num_devices:
                raise
            continue
        rewrites = tuple(str(p) for p in paddings(graph, degree))
        padded = rewritten(graph, rewrites)
        program = unfold(padded, factorize(padded) if rewrites else factored, mesh)
        assignments = spread(program, seeds, Megatron(program))
        before, split = split, _split_heads(program, assignments)
        if not before.issubset(split):
            return
        yield Decisions(
            mesh,
            decisions(program, assignments),
            num_microbatches=num_microbatches,
            rewrites=rewrites,
        )


def _split_heads(program: Unfolded, assignments: Sequence[Assignment]) -> frozenset[str]:
    """The attentions that the tensor axis splits, by their keys."""
    return frozenset(
        flat.key
        for flat, assignment in zip(program.nodes, assignments, strict=True)
        if flat.node.op == ATTENTION and any(TENSOR in axes for axes in assignment.values())
    )


# How many operators one looks ahead, and how many walks a new one is compared with.
FAR, RECENT = 200, 2


@dataclass(frozen=True, slots=True)
class Visit:
    """What a walk met at the operator `offset` after its first one: the operator's rule, its
    readers, and the layouts of operands that were not made on the way.
    """

    offset: int
    rule: Rule
    readers: tuple[int, ...]
    outside: tuple[tuple[int, Layout | None], ...]


class Megatron:
    """Chooses the weight factor that carries the tensor axis to the next product unbroken."""

    def __init__(self, program: Unfolded) -> None:
        self.program = program
        self.walks: dict[object, list[tuple[tuple[Visit, ...], bool]]] = {}

    def __call__(
        self, index: int, assignment: Assignment, layouts: Mapping[str, Layout]
    ) -> Assignment:
        flat, rule = self.program.nodes[index], self.program.rules[index]
        if any(TENSOR in axes for axes in assignment.values()):
            return assignment
        weights = [i for i, name in enumerate(flat.operands) if name in self.program.parameters]
        op = flat.node.op
        if op in LOOKUPS:
            rows = [f for f in rule.shardable if f.startswith("v")]
            return self._with(index, assignment, rows[:1]) or assignment
        if op not in WEIGHT_OPS or not weights:
            return assignment
        own = {f for i in weights for dim in rule.operands[i] for f in dim}
        shared = {
            f
            for i, dims in enumerate(rule.operands)
            if i not in weights and self.program.specs[flat.operands[i]].is_float
            for dim in dims
            for f in dim
        }
        for factor in rule.shardable:
            if factor in own - shared:
                trial = self._with(index, assignment, [factor])
                if trial and self._arrives(index, trial, layouts):
                    return trial
        return assignment

    def _with(self, index: int, assignment: Assignment, factors: list[str]) -> Assignment | None:
        rule, mesh = self.program.rules[index], self.program.mesh
        for factor in factors:
            axes = (*assignment.get(factor, ()), TENSOR)
            if rule.size(factor) % mesh.size(axes) == 0:
                return assignment | {factor: axes}
        return None

    def _arrives(self, start: int, trial: Assignment, layouts: Mapping[str, Layout]) -> bool:
        """Whether every value that carries the axis is read without a gather, up to where the
        axis is contracted (a row-parallel product, a loss over classes), or further than one looks.

        Blocks repeat: a walk that would meet what one before it met ends as that did.
        """
        key = id(self.program.rules[start]), tuple(trial.items())
        walks = self.walks.setdefault(key, [])
        for met, arrived in walks[-RECENT:]:
            if all(self._meets(start, visit, layouts) for visit in met):
                return arrived
        met, arrived = self._walk(start, trial, layouts)
        walks.append((met, arrived))
        return arrived

    def _meets(self, start: int, visit: Visit, layouts: Mapping[str, Layout]) -> bool:
        """Whether a walk from `start` would find at an operator what `visit` found there."""
        index = start + visit.offset
        if index >= len(self.program.nodes) or self.program.rules[index] is not visit.rule:
            return False
        operands = self.program.nodes[index].operands
        return self._readers(index, start) == visit.readers and all(
            layouts.get(operands[position]) == layout for position, layout in visit.outside
        )

    def _readers(self, index: int, start: int) -> tuple[int, ...]:
        """Who reads the results of an operator, counted from `start`."""
        program = self.program
        return tuple(
            reader - start
            for name in program.nodes[index].results
            for reader in program.readers.get(name, ())
        )

    def _walk(
        self, start: int, trial: Assignment, layouts: Mapping[str, Layout]
    ) -> tuple[tuple[Visit, ...], bool]:
        """What a walk from `start` meets, and whether it arrives."""
        program, known = self.program, dict[str, Layout]()
        record(program, start, trial, known)
        met = [Visit(0, program.rules[start], self._readers(start, start), ())]
        frontier = sorted({start + offset for offset in met[0].readers})  # a heap, too
        done: set[int] = set()
        reached = False
        while frontier:
            index = heappop(frontier)
            if index in done:
                continue
            if len(done) == FAR:
                return tuple(met), True
            done.add(index)
            operands = program.nodes[index].operands
            outside = tuple((p, layouts.get(n)) for p, n in enumerate(operands) if n not in known)
            met.append(
                Visit(index - start, program.rules[index], self._readers(index, start), outside)
            )
            seen = {n: known.get(n) or layouts.get(n, Layout()) for n in operands}
            assignment = followed(program, index, seen)
            for position, name in enumerate(operands):
                if TENSOR not in seen[name].axes:
                    continue
                if program.operand_layout(index, position, assignment) != seen[name]:
                    return tuple(met), False
            record(program, index, assignment, known)
            for name in program.nodes[index].results:
                if TENSOR in known[name].axes:
                    for reader in program.readers.get(name, ()):
                        heappush(frontier, reader)
                else:
                    reached = True
        return tuple(met), reached


def random_plan(
    graph: Graph, factored: Factored, mesh: Mesh, seed: int, num_microbatches: int = 1
) -> Decisions:
    """A legal plan with every operator's layout drawn from all that its rule allows.

    Every axis of the mesh goes, independently per operator, to a uniformly chosen factor that it
    divides or to none; storage is drawn per parameter from the legal ZeRO triples.
    """
    rng = random.Random(seed)
    nodes = []
    for flat in graph.flat():
        rule = factored.rule(flat.function, flat.node)
        assignment: Assignment = {}
        for axis in rng.sample(mesh.names, len(mesh.names)):
            fitting: list[str | None] = [
                f
                for f in rule.shardable
                if rule.size(f) % (num_microbatches * mesh.size((*assignment.get(f, ()), axis)))
                == 0
            ]
            factor = rng.choice([*fitting, None])
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        nodes.append(NodeDecision(flat.key, tuple(assignment.items())))
    plan = Decisions(mesh, tuple(nodes), num_microbatches=num_microbatches)
    return replace(plan, parameters=_random_storage(graph, factored, plan, rng))


def _random_storage(
    graph: Graph, factored: Factored, plan: Decisions, rng: random.Random
) -> tuple[ParameterDecision, ...]:
    result = []
    for parameter in lower(graph, plan, factored=factored).parameters:
        shape = parameter.input.value.spec.shape
        free = [a for a in plan.mesh.names if a not in parameter.layout.axes]
        axes = tuple(a for a in free if rng.random() < 0.5)
        if not shape or not axes:
            continue
        storage = Storage(axes, rng.randrange(len(shape)))
        level = rng.randrange(4)
        result.append(
            ParameterDecision(
                parameter.input.target,
                storage if level == 3 else Storage(),
                storage if level >= 2 else Storage(),
                storage if level >= 1 else Storage(),
            )
        )
    return tuple(result)


def random_plans(
    graph: Graph, cluster: Cluster, num_microbatches: int = 1, seed: int = 0
) -> Iterator[Decisions]:
    """One random legal plan on a random factorisation of the cluster into at most two axes."""
    rng = random.Random(seed)
    primes = cluster.prime_axes()
    cut = rng.randrange(len(primes) + 1) if primes else 0
    parts = [p for p in (primes[cut:], primes[:cut]) if p] or [(PrimeAxis(1, 1, 0),)]
    mesh = Mesh(tuple(MeshAxis(n, tuple(reversed(p))) for n, p in zip("xy", parts, strict=False)))
    yield random_plan(graph, factorize(graph), mesh, seed, num_microbatches)


METHODS: Mapping[str, Method] = {
    "data_parallel": data_parallel,
    "fsdp": fsdp,
    "megatron": megatron,
    "random": random_plans,
}
