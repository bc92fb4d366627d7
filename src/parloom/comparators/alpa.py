"""Alpa's intra-operator pass (Zheng et al., OSDI 2022, section 4) on the whole cluster, or on the
devices of a stage.

For every two-dimensional view of the devices an integer program chooses a way to split each
operator so that least is communicated: inside operators, between them, and for gradients. Computing
counts nothing, since heavy operators are split over all devices (section 4.2); cheap operators
follow one of their operands. Afterwards all-reduces of gradients become reduce-scatters, with
gathers of updated weights, which is ZeRO's storage. Views, limits of the space and the order of
these steps are those of the released code (`auto_sharding`, `stage_construction`).
`docs/explanation/comparators.md` says what differs here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parloom.comparators.ilp import least
from parloom.comparators.plans import (
    Whole,
    asked_program,
    communicated,
    planned,
    samples_of,
)
from parloom.comparators.tensor_parallel import LOOKUPS
from parloom.cost.kernels import ATTENTION, factors_of
from parloom.cost.walk import Walker
from parloom.ir.factors import follow
from parloom.ir.layout import Layout
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.ops.rule import HALO
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Menus, assignments
from parloom.search.fates import AskedFates
from parloom.search.layout_model import LayoutModel
from parloom.search.meshes import logical_meshes
from parloom.search.model import Indices, Model, Term, View
from parloom.search.prices import Known
from parloom.search.program import Axes, Flow, Operator, Program
from parloom.search.request import Request, Say
from parloom.search.single import Single
from parloom.search.solve.columns import Problem
from parloom.search.storage import Level, StoragePrices, StoredWeight, stored_of

# Branches of an integer program, where the user says nothing.
NODES = 10_000
Assignment = dict[str, Axes]
Samples = Mapping[int, str]


@dataclass(frozen=True)
class Followed:
    """For every variable the one that decides it, and its value for each value of that."""

    leader: tuple[int, ...]
    values: tuple[Indices, ...]


def alpa_intra(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best plan of every view of the cluster.

    Raises `InputError` where samples do not divide into as many microbatches as `base` has.
    """
    program = asked_program(request, base)
    samples, shared = samples_of(program), Known()
    for mesh in views(request.cluster):
        walker = Walker({}, mesh, request.cluster, request.machine.kernels)
        nodes = request.budget or NODES
        found = on_view(program, samples, walker, base, request.optimizer, nodes, shared)
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
        if found is None:
            say(f"alpa_intra: mesh {sizes}: nothing found within the budget")
            continue
        plan, cost = found
        say(f"alpa_intra: mesh {sizes}: {cost / 1e12:.4g} s of communication")
        yield plan


def on_view(
    program: Program,
    samples: Samples,
    walker: Walker,
    base: Decisions,
    optimizer: Optimizer,
    max_nodes: int,
    shared: Known,
) -> tuple[Decisions, float] | None:
    """The plan that communicates least on the mesh of `walker`, and how long that takes (ps); None
    where none is found in `max_nodes` branches.
    """
    found = None
    for limited in (True, False):
        among = samples if limited else None
        layouts = layouts_of(program, walker, base, optimizer, among, shared)
        followed = followers(layouts, samples) if limited else nobody(layouts)
        found = solve(layouts, followed, base.num_microbatches, max_nodes)
        if found is not None:
            break
    if found is None:
        return None
    storage = StoragePrices(walker, base, optimizer)
    levels = []
    for index, weight in enumerate(program.weights):
        stored = stored_of(program, weight, *layouts.weights.home(index, found.values))
        levels.append(scattered(storage, stored, base.num_microbatches))
    return planned(layouts, found.values, levels, base), found.cost


def views(cluster: Cluster) -> Iterator[Mesh]:
    """Meshes of two axes whose inner one stays inside a node, and that of one axis
    (`single_node_model_parallel`, the default of the released code).
    """
    for mesh in logical_meshes(cluster, 2):
        if len(mesh.axes) == 1 or mesh.axes[1].level == 0:
            yield mesh


def layouts_of(
    program: Program,
    walker: Walker,
    base: Decisions,
    optimizer: Optimizer,
    samples: Samples | None,
    shared: Known | None = None,
) -> LayoutModel:
    """What the integer program chooses among; with None for `samples`, among all there is.

    Weights are whole, and gradients all-reduced.
    """
    known = Menus(program, Single(program.graph, program.factored, walker.mesh))
    menus, products = [], heavy(program)
    for index, operator in enumerate(program.operators):
        every = assignments(operator.rule, walker.mesh)
        kept = tuple(own for own in every if not operator.rule.summed_axes(own))  # XLA adds sums
        if samples is not None:
            kept = _samples_first(kept, walker.mesh, samples.get(index))
        if samples is not None and index in products:
            kept = _over_all(operator, kept, walker.mesh)
        menus.append(known.of(index, kept))
    storage, fates = Whole(walker, base, optimizer), AskedFates(program)
    return LayoutModel(program, walker, base, optimizer, shared, menus, storage, fates)


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
    found: Sequence[Assignment], mesh: Mesh, samples: str | None
) -> tuple[Assignment, ...]:
    """On a mesh of two axes, the samples on the first only (`force_batch_dim_to_mesh_dim`)."""
    inner = set(mesh.names[1:])
    return tuple(one for one in found if not inner.intersection(one.get(samples or "", ())))


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


def scattered(storage: StoragePrices, weight: StoredWeight, num_microbatches: int) -> Level:
    """Storage where the all-reduce of a gradient is a reduce-scatter and a gather of the updated
    weight; with several microbatches, gradients are added up before.
    """
    for level in storage.options(weight)[0]:
        over = weight.reduce and set(level.optimizer) == set(weight.reduce)
        if over and level.zero == (1 if num_microbatches > 1 else 2):
            return level
    return Level()


# Followers


def followers(layouts: LayoutModel, samples: Samples) -> Followed:
    """Who follows whom: a cheap operator the operand that is made last (the deepest one), of those
    that have samples if any has: not a table of positions.
    """
    program = layouts.program
    others = set(range(len(program.operators))) - deciding(program)
    leads = {i: lead for i in sorted(others) if (lead := _lead(program, i, samples))}
    leader: list[int] = []
    values: list[Indices] = []
    for variable in range(len(layouts.variables)):
        path = [variable]
        while path[-1] in leads and leads[path[-1]][0].operator not in path:
            path.append(leads[path[-1]][0].operator)
        if path[-1] in leads:  # a ring of followers: none of them
            path = [variable]
        chosen: Indices = np.arange(len(layouts.variables[path[-1]]), dtype=np.intp)
        for follower in reversed(path[:-1]):
            chosen = _as_read(layouts, follower, *leads[follower])[chosen]
        leader.append(path[-1])
        values.append(chosen)
    return Followed(tuple(leader), tuple(values))


def nobody(layouts: LayoutModel) -> Followed:
    """Nobody follows."""
    ranges = (np.arange(len(variable), dtype=np.intp) for variable in layouts.variables)
    return Followed(tuple(range(len(layouts.variables))), tuple(ranges))


def _lead(program: Program, index: int, samples: Samples) -> tuple[Flow, int] | None:
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
        key=lambda f: (
            f[0].operator in samples,
            f[0].operator < index,
            f[0].operator,
            f[0].count,
            -f[1],
        ),
        default=None,
    )


def _as_read(layouts: LayoutModel, follower: int, flow: Flow, operand: int) -> Indices:
    """For every choice of the operator that `flow` comes from, the choice of one that takes it as
    it lies, what is partial being whole.
    """
    rule, menu = layouts.program.operators[follower].rule, layouts.options[follower].menu
    known = {choice.assignment: i for i, choice in reversed(list(enumerate(menu.choices)))}
    source = layouts.options[flow.operator].menu.results[flow.result]
    found = []
    for state in source.values:
        lying = [Layout()] * len(rule.operands)
        lying[operand] = state.layout.without(state.layout.partial_axes)
        taken = follow(rule, tuple(lying), layouts.mesh)
        found.append(known.get(tuple(sorted(taken.items())), known[()]))
    return np.array(found, dtype=np.intp)[source.index]


# The integer program


@dataclass(frozen=True)
class Answer:
    """A value for every variable of a layout model, and what is communicated (ps)."""

    values: tuple[int, ...]
    cost: float


def solve(
    problem: Problem, followed: Followed, num_microbatches: int, max_nodes: int
) -> Answer | None:
    """The least communication of a step in `max_nodes` branches; None where none was found.

    Readers that share a movement pay a share each; where they do not share it, the program is
    solved again with an exact term.
    """
    prices, left = communicated(num_microbatches), max_nodes
    leaders = sorted(set(followed.leader))
    joint: set[int] = set()
    values: tuple[int, ...] | None = None
    while left > 0:
        model = _led(problem.model(joint), followed, leaders)
        found = least(model, prices, left)
        if found is None:
            break
        at = dict(zip(leaders, found.values, strict=False))
        every = zip(followed.leader, followed.values, strict=True)
        values = tuple(int(of[at[leader]]) for leader, of in every)
        missed = problem.unshared(values, prices).keys() - joint
        left -= found.nodes
        if not missed:
            break
        joint |= missed
    if values is None:
        return None
    return Answer(values, float(problem.evaluate(values, prices) @ prices))


def _led(model: Model, followed: Followed, leaders: Sequence[int]) -> Model:
    """The model in terms of the variables that decide; copies of flows are their own leaders."""
    own = range(len(followed.leader), len(model.variables))
    place = {variable: i for i, variable in enumerate((*leaders, *own))}

    def seen(view: View) -> View:
        if view.variable in own:
            return View(place[view.variable], view.index, view.size)
        index = view.index[followed.values[view.variable]]
        return View(place[followed.leader[view.variable]], index, view.size)

    terms = (Term(tuple(map(seen, t.views)), t.alternatives, t.rows, t.name) for t in model.terms)
    return Model(model.rows, tuple(model.variables[v] for v in place), tuple(terms))
