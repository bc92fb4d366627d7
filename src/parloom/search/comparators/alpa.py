"""Alpa's intra-operator pass (Zheng et al., OSDI 2022, section 4) on the whole cluster.

For every two-dimensional view of the devices an integer program chooses a way to split each
operator so that least is communicated: inside operators, between them, and for gradients. Computing
counts nothing, since heavy operators are split over all devices (section 4.2); cheap operators
follow one of their operands. Afterwards all-reduces of gradients become reduce-scatters, with
gathers of updated weights, which is ZeRO's storage. Views, limits of the space and the order of
these steps are those of the released code (`auto_sharding`, `stage_construction`).
`docs/comparators.md` says what differs here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parloom.cost.kernels import ATTENTION, factors_of
from parloom.cost.walk import Walker
from parloom.errors import InputError
from parloom.ir.factors import factorize, follow
from parloom.ir.layout import Layout
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.ops.rule import HALO
from parloom.ir.plan import Decisions
from parloom.search.baselines import DATA, LOOKUPS, batch_seeds, mesh_of
from parloom.search.choices import Menus, assignments
from parloom.search.comparators.ilp import least
from parloom.search.comparators.plans import ALONE, Whole, communicated, planned
from parloom.search.eliminate import Factor
from parloom.search.layouts import LayoutProblem
from parloom.search.meshes import logical_meshes
from parloom.search.prices import Known
from parloom.search.program import Axes, Flow, Operator, Program, program_of
from parloom.search.question import Question, Say
from parloom.search.single import Single
from parloom.search.spread import spread, unfold
from parloom.search.storage import Level, StoragePrices, Stored

# Branches of an integer program, where the user says nothing.
NODES = 10_000
Indices = NDArray[np.intp]
Assignment = dict[str, Axes]
Samples = Mapping[int, frozenset[str]]


@dataclass(frozen=True)
class Followed:
    """For every variable the one that decides it, and its value for each value of that."""

    leader: tuple[int, ...]
    values: tuple[Indices, ...]


def alpa(question: Question, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best plan of every view of the cluster.

    Raises `InputError` where an integer program finds none within the budget.
    """
    if question.cluster.num_devices == 1:
        yield replace(base, mesh=ALONE)
        return
    program = program_of(question.graph, factorize(question.graph))
    samples, shared = samples_of(program, question.cluster), Known()
    for mesh in views(question.cluster):
        walker = Walker({}, mesh, question.cluster, question.kernels)
        found = None
        for limited in (True, False):
            among = samples if limited else None
            problem = problem_of(program, walker, base, question, among, shared)
            followed = followers(problem) if limited else nobody(problem)
            found = solve(problem, followed, question.budget or NODES)
            if found is not None:
                break
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
        if found is None:
            say(f"alpa: mesh {sizes}: nothing found within the budget")
            continue
        say(f"alpa: mesh {sizes}: {found.cost / 1e12:.4g} s of communication")
        storage = StoragePrices(walker, base, question.optimizer)
        levels = [
            scattered(storage, problem.stored(i, found.values), base.num_microbatches)
            for i in range(len(program.weights))
        ]
        yield planned(problem, found.values, levels, base)


def views(cluster: Cluster) -> Iterator[Mesh]:
    """Meshes of two axes whose inner one stays inside a node, and that of one axis
    (`single_node_model_parallel`, the default of the released code).
    """
    for mesh in logical_meshes(cluster, 2):
        if len(mesh.axes) == 1 or mesh.axes[1].level == 0:
            yield mesh


def samples_of(program: Program, cluster: Cluster) -> Samples:
    """The factors of every operator that the samples of the batch make, where they divide."""
    mesh = mesh_of(cluster)
    try:
        seeds = batch_seeds(program.graph, mesh)
    except InputError:
        return {}
    unfolded = unfold(program.graph, program.factored, mesh)
    found: dict[int, frozenset[str]] = {}
    for flat, assignment in zip(unfolded.nodes, spread(unfolded, seeds), strict=True):
        on = frozenset(f for f, axes in assignment.items() if DATA in axes)
        index = program.index[flat.key]
        found[index] = found.get(index, frozenset()) | on
    return found


def problem_of(
    program: Program,
    walker: Walker,
    base: Decisions,
    question: Question,
    samples: Samples | None,
    shared: Known | None = None,
) -> LayoutProblem:
    """What the integer program chooses among; with None for `samples`, among all there is."""
    known = Menus(program, Single(program.graph, program.factored, walker.mesh))
    menus, products = [], heavy(program)
    for index, operator in enumerate(program.operators):
        kept = tuple(assignments(operator.rule, walker.mesh))
        if samples is not None:
            kept = _samples_first(kept, walker.mesh, samples.get(index, frozenset()))
        if samples is not None and index in products:
            kept = _over_all(operator, kept, walker.mesh)
        menus.append(known.of(index, kept))
    storage = Whole(walker, base, question.optimizer)
    return LayoutProblem(
        program, walker, base, question.optimizer, menus=menus, storage=storage, shared=shared
    )


def deciding(program: Program) -> frozenset[int]:
    """Operators that have ways of their own to be split and do not follow an operand: those that
    multiply matrices or read tables of weights, and what is made of weights alone.
    """
    found = {reader.operator for weight in program.weights if len(weight.spec.shape) > 1
             for reader in weight.readers}  # fmt: skip
    for index, operator in enumerate(program.operators):
        if multiplies(operator) or operator.derived or operator.exposed:
            found.add(index)
    return frozenset(found)


def heavy(program: Program) -> frozenset[int]:
    """Operators that multiply matrices, recurrent layers and experts included."""
    lookups = {i for i, o in enumerate(program.operators) if o.node.op in LOOKUPS or o.derived}
    return deciding(program) - lookups


def multiplies(operator: Operator) -> bool:
    """Whether it is a product of two of its operands."""
    return operator.node.op == ATTENTION or _factors(operator) is not None


def _factors(operator: Operator) -> tuple[int, int] | None:
    return factors_of(operator.node.op, len(operator.rule.operands))


def _samples_first(
    found: Sequence[Assignment], mesh: Mesh, samples: frozenset[str]
) -> tuple[Assignment, ...]:
    """On a mesh of two axes, the samples on the first only (`force_batch_dim_to_mesh_dim`)."""
    inner = set(mesh.names[1:])
    return tuple(
        one for one in found if not any(f in samples and inner & set(a) for f, a in one.items())
    )


def _over_all(
    operator: Operator, found: Sequence[Assignment], mesh: Mesh
) -> tuple[Assignment, ...]:
    """Split over as many devices as can be, over the batch of the matrices if they have one
    (`allow_recompute_heavy_op`, `batch_matmul_always_split_batch`), and not along windows.
    """
    rule = operator.rule
    plain = {f for f, _ in rule.sizes if rule.kind(f) != HALO}
    for allowed in (plain & _batch(operator), plain):
        some = [one for one in found if one.keys() <= allowed]
        size = [mesh.size(tuple(a for axes in one.values() for a in axes)) for one in some]
        most = max(size, default=1)
        if most == mesh.num_ranks or allowed == plain:
            break
    return tuple(one for one, count in zip(some, size, strict=True) if count == most)


def _batch(operator: Operator) -> frozenset[str]:
    """Factors that both matrices and their product have."""
    if not multiplies(operator):
        return frozenset()
    first, second = _factors(operator) or (0, 1)
    rule = operator.rule
    tensors = rule.operands[first], rule.operands[second], rule.results[0]
    return frozenset.intersection(*(frozenset(f for d in dims for f in d) for dims in tensors))


def scattered(storage: StoragePrices, weight: Stored, num_microbatches: int) -> Level:
    """Storage where the all-reduce of a gradient is a reduce-scatter and a gather of the updated
    weight; with several microbatches, gradients are added up before.
    """
    for level in storage.options(weight)[0]:
        over = weight.reduce and set(level.axes) == set(weight.reduce)
        if over and not level.weight and (level.gradient or num_microbatches > 1):
            return level
    return Level()


# Followers


def followers(problem: LayoutProblem) -> Followed:
    """Who follows whom: a cheap operator the operand that is made last (the deepest one)."""
    program = problem.program
    others = set(range(len(program.operators))) - deciding(program)
    leads = {i: lead for i in sorted(others) if (lead := _lead(program, i)) is not None}
    leader: list[int] = []
    values: list[Indices] = []
    for variable in range(len(problem.sizes)):
        path = [variable]
        while path[-1] in leads and leads[path[-1]][0].operator not in path:
            path.append(leads[path[-1]][0].operator)
        if path[-1] in leads:  # a ring of followers: none of them
            path = [variable]
        chosen: Indices = np.arange(problem.sizes[path[-1]], dtype=np.intp)
        for follower in reversed(path[:-1]):
            chosen = _as_read(problem, follower, *leads[follower])[chosen]
        leader.append(path[-1])
        values.append(chosen)
    return Followed(tuple(leader), tuple(values))


def nobody(problem: LayoutProblem) -> Followed:
    """Nobody follows."""
    ranges = (np.arange(size, dtype=np.intp) for size in problem.sizes)
    return Followed(tuple(range(len(problem.sizes))), tuple(ranges))


def _lead(program: Program, index: int) -> tuple[Flow, int] | None:
    """The flow that an operator follows, and the operand that it is."""
    found = [
        (flow, reader.operand)
        for flow in program.flows
        if flow.operator >= 0
        for reader in flow.readers
        if reader.operator == index
    ]
    # What is made before it in its block comes before what the block before made.
    return max(
        found,
        key=lambda f: (f[0].operator < index, f[0].operator, f[0].count, -f[1]),
        default=None,
    )


def _as_read(problem: LayoutProblem, follower: int, flow: Flow, operand: int) -> Indices:
    """For every choice of the operator that `flow` comes from, the choice of one that takes it as
    it lies, what is partial being whole.
    """
    rule, menu = problem.program.operators[follower].rule, problem.menus[follower]
    known = {choice.assignment: i for i, choice in reversed(list(enumerate(menu.choices)))}
    source = problem.menus[flow.operator].results[flow.result]
    found = []
    for state in source.values:
        lying = [Layout()] * len(rule.operands)
        lying[operand] = state.layout.without(state.layout.partial_axes)
        taken = follow(rule, tuple(lying), problem.mesh)
        found.append(known.get(tuple(sorted(taken.items())), known[()]))
    return np.array(found, dtype=np.intp)[source.index]


# The integer program


@dataclass(frozen=True)
class Answer:
    """A value for every variable of a problem, and what is communicated (ps)."""

    values: tuple[int, ...]
    cost: float


def solve(problem: LayoutProblem, followed: Followed, max_nodes: int) -> Answer | None:
    """The least communication in `max_nodes` branches; None where none was found."""
    factors = [_led(f, followed) for f in problem.factors(communicated())]
    leaders = sorted(set(followed.leader))
    place = {leader: i for i, leader in enumerate(leaders)}
    placed = [Factor(tuple(place[v] for v in f.scope), f.costs) for f in factors]
    found = least([problem.sizes[leader] for leader in leaders], placed, max_nodes)
    if found is None:
        return None
    values = (
        int(values[found.values[place[leader]]])
        for leader, values in zip(followed.leader, followed.values, strict=True)
    )
    return Answer(tuple(values), found.cost)


def _led(factor: Factor, followed: Followed) -> Factor:
    """A table in terms of the variables that decide."""
    scope = tuple(followed.leader[v] for v in factor.scope)
    maps = [followed.values[v] for v in factor.scope]
    if len(set(scope)) < len(scope):
        return Factor(scope[:1], factor.costs[tuple(maps)])
    return Factor(scope, factor.costs[np.ix_(*maps)] if maps else factor.costs)
