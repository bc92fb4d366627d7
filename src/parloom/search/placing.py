"""Lays a plan where its step is shortest: the second phase of the search for a placement.

The first phase searches logical plans with each collective where it is fastest (`anywhere`): the
step of such a plan is one that no placement of it is expected to undercut, and where that is no
better than the best plan so far, the plan lies by default. Else placements are simulated, but for
those of which another is faster in all that the plan sends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from parloom.cost.embedding import pattern_of
from parloom.cost.engine import Launch
from parloom.cost.exchanges import Asked
from parloom.cost.links import Floats
from parloom.cost.simulate import Simulator, step_tasks
from parloom.cost.step import priced
from parloom.cost.tasks import OF_WEIGHTS, StepTasks, kind_of, loads
from parloom.cost.walk import Walker
from parloom.ir.expected import Prediction, Status
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.rewrite.rewrites import rewritten
from parloom.search.anywhere import anywhere
from parloom.search.contexts import SimulatedPlan
from parloom.search.every_order import front
from parloom.search.optimize import search
from parloom.search.placements import Sent, placements
from parloom.search.request import Request, Say
from parloom.search.searched import Searched, rank

# Logical plans that are looked at.
LOGICAL = 6
# Placements of a plan that are simulated, those first that send fastest.
SIMULATED = 24
# The share by which the best plan may be slower where it lies than it was taken to be.
LOOSE = 0.01
# How near to the step that no placement undercuts is near enough.
NEAR = 1e-4


@dataclass(frozen=True)
class Placed:
    """The best placement of a plan; the step with each collective where it is fastest; how many
    placements were there, and how many simulated.
    """

    plan: SimulatedPlan
    least_ps: float
    num_placements: int
    num_simulated: int


def place(request: Request, plan: SimulatedPlan, best_ps: float = inf) -> Placed:
    """The plan of one stage where it is fastest, as far as it may be faster than `best_ps`."""
    decisions = plan.decisions
    own = request.on(decisions.num_ranks)
    graph = rewritten(request.graph, decisions.rewrites)
    pcg = lower(graph, decisions, factored=factorize(graph))
    kernels, cluster = own.machine.kernels, own.cluster
    walker = priced(pcg, cluster, decisions, own.optimizer, kernels).walker
    sent = [what for what in walker.exchanges.sent if what[2] and decisions.mesh.size(what[1]) > 1]
    meshes = placements(decisions.mesh, cluster, patterns_of(sent))
    seconds = np.empty((len(meshes), len(sent)))
    for row, mesh in enumerate(meshes):
        there = Walker({}, mesh, cluster, kernels)
        seconds[row] = [there.exchange(*what).seconds for what in sent]
    rows = front(seconds)
    undominated = tuple(meshes[row] for row in rows)
    kernels = anywhere(own.machine).kernels
    tasks = step_tasks(pcg, cluster, decisions, own.optimizer, kernels)
    least_ps = float(Simulator().play(tasks).step_ps)
    order = np.argsort(sending_ps(tasks, sent, seconds[rows]), kind="stable")[:SIMULATED]
    best, simulated = plan, 0
    for mesh in (undominated[i] for i in order) if least_ps < best_ps else ():
        if best.step_ps <= least_ps * (1 + NEAR):
            break
        if mesh == decisions.mesh:
            continue
        moved = on_mesh(pcg, mesh)
        found = own.machine.simulate(moved, moved.decisions, own.optimizer).prediction()
        simulated += 1
        if found.step_s < best.prediction.step_s:
            best = replace(plan, decisions=with_mesh(decisions, mesh), prediction=found)
    return Placed(best, least_ps, len(meshes), simulated)


def sending_ps(tasks: StepTasks, sent: Sequence[Asked], seconds: Floats) -> Floats:
    """About how long a step sends on each placement [placement, what is sent]: what `tasks` launch
    where each is fastest, as often as they do, times how much longer collectives of that kind over
    these axes take there.
    """
    fastest_ps: Counter[tuple[str, str]] = Counter()
    for placed in (part for action in tasks.actions for part in action.parts):
        for launch in placed.segment.instructions:
            if isinstance(launch, Launch):
                *_, (channel, ps) = loads([launch], tasks.capacities)
                kind = kind_of(launch.key).split()[-1]
                fastest_ps[kind, str(channel).removesuffix(OF_WEIGHTS).strip()] += ps
    longer = seconds / seconds.min(axis=0)
    total = np.zeros(len(seconds))
    for (kind, joined), ps in fastest_ps.items():
        over = [i for i, (_, axes, _) in enumerate(sent) if "+".join(sorted(axes)) == joined]
        # What is quantized was asked for as other kinds.
        alike = [i for i in over if sent[i][0] == kind] or over
        if alike:
            total += ps * longer[:, alike].mean(axis=1)
    return total


def best_placed(request: Request, found: Searched, base: Decisions, say: Say) -> Searched:
    """What was searched as if a mesh lay where it is best for each collective, placed; where that
    is slower by more than a little, with faster plans that are found at default prices.
    """
    laid = placed(request, found)
    expected, best = (min(own.proposals, key=rank, default=None) for own in (found, laid))
    ended = laid.status is not Status.COMPLETE
    if ended or not expected or not best or best.step_ps <= expected.step_ps * (1 + LOOSE):
        return laid
    say("no placement has all collectives where they are fastest: searching default meshes, too")
    left = replace(request, budget=laid.work_left)
    more = placed(request, search(left, base, say, best))
    status = laid.status if more.status is Status.COMPLETE else more.status
    proposals = sorted((*laid.proposals, *more.proposals), key=rank)
    return replace(laid, proposals=tuple(proposals), status=status, work_left=more.work_left)


def placed(request: Request, searched: Searched) -> Searched:
    """What was searched `anywhere`, as it lies: of each size of the axes and number of microbatches
    the fastest plan, as far as any placement of it may be faster than the best; plans of several
    stages as they are.
    """
    several = [plan for plan in searched.proposals if len(plan.decisions.stages) > 1]
    one = [plan for plan in searched.proposals if len(plan.decisions.stages) == 1]
    looked: set[object] = set()
    sizes: set[int] = set()
    laid: list[SimulatedPlan] = []
    best_ps = min((plan.step_ps for plan in several), default=inf)
    status = searched.status
    try:
        for plan in sorted(one, key=lambda plan: plan.step_ps):
            own = plan.decisions
            kind = tuple(axis.size for axis in own.mesh.axes), own.num_microbatches
            if kind not in looked and (len(looked) < LOGICAL or own.num_ranks not in sizes):
                looked.add(kind)
                sizes.add(own.num_ranks)
                laid.append(as_placed(request, plan, best_ps))
                best_ps = min(best_ps, laid[-1].step_ps)
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
    small = searched.smallest
    return replace(
        searched,
        proposals=tuple(sorted((*several, *laid), key=rank)),
        status=status,
        smallest=small and replace(small, prediction=_by_default(request, small.decisions)),
    )


def as_placed(request: Request, plan: SimulatedPlan, best_ps: float = inf) -> SimulatedPlan:
    """A plan of one stage that was searched `anywhere` where it is fastest; see `place`."""
    there = replace(plan, prediction=_by_default(request, plan.decisions))
    return place(request, there, best_ps).plan if plan.step_ps < best_ps else there


def _by_default(request: Request, decisions: Decisions) -> Prediction:
    return request.on(decisions.num_ranks).predict(decisions)


def patterns_of(sent: Sequence[Asked]) -> Sent:
    """What placements differ in, for collectives that go alike."""
    return tuple(sorted({(pattern_of(kind), axes) for kind, axes, _ in sent}))


def with_mesh(decisions: Decisions, mesh: Mesh) -> Decisions:
    """The same decisions of one stage on another mesh of the same axes."""
    (stage,) = decisions.stages
    return replace(decisions, stages=(replace(stage, mesh=mesh),))


def on_mesh(pcg: PCG, mesh: Mesh) -> PCG:
    """The same program where `mesh` lies: layouts know sizes of axes only."""
    in_time = [axis for axis in pcg.mesh.axes if axis.steps]
    whole = replace(mesh, axes=(*mesh.axes, *in_time))
    return replace(pcg, decisions=with_mesh(pcg.decisions, mesh), mesh=whole)
