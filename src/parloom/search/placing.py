"""Lays a plan where its step is shortest: the second phase of the search for a placement.

The first phase searches logical plans with each collective where it is fastest (`anywhere`): the
step of such a plan is one that no placement of it is expected to undercut, and where that is no
better than the best plan so far, the plan lies by default. Else placements are simulated, but for
those of which another is faster in all that the plan sends.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from parloom.cost.embedding import pattern_of
from parloom.cost.engine import Launch
from parloom.cost.exchanges import Asked
from parloom.cost.links import Floats
from parloom.cost.simulate import step_tasks
from parloom.cost.step import priced
from parloom.cost.tasks import OF_WEIGHTS, StepTasks, kind_of, loads
from parloom.cost.walk import Walker
from parloom.ir.expected import Prediction, Status
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import LoweredStages, lower_stages, staged
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.rewrite.rewrites import rewritten
from parloom.search.anywhere import anywhere
from parloom.search.contexts import SimulatedPlan
from parloom.search.every_order import front
from parloom.search.pipelines.alike import AlikeStages
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
    """The plan where it is fastest, as far as it may be faster than `best_ps`. Stages on equal
    meshes lie alike; of several meshes each is laid after those before it.
    """
    own = request.on(plan.decisions.num_ranks)
    lowered = _lowered(own.graph, plan.decisions)
    logical = replace(own, machine=anywhere(own.machine))
    expected = logical.predict_stages(lowered, plan.decisions)
    least_ps = replace(plan, prediction=expected).step_ps
    found = Placed(plan, least_ps, 0, 0)
    for mesh in dict.fromkeys(stage.mesh for stage in plan.decisions.stages):
        found = _with_mesh_placed(own, lowered, found, mesh, best_ps)
    return found


def _lowered(graph: Graph, decisions: Decisions) -> LoweredStages:
    """The programs of a plan's stages, one object for those that are alike."""
    factored = factorize(rewritten(graph, decisions.rewrites))
    if len(decisions.stages) == 1:
        return lower_stages(factored.graph, decisions, factored=factored)
    return AlikeStages().lower(staged(factored, decisions), decisions)


def _with_mesh_placed(
    request: Request, lowered: LoweredStages, found: Placed, mesh: Mesh, best_ps: float
) -> Placed:
    """The best plan with the stages on `mesh` elsewhere, of those that are simulated."""
    there = request.on(mesh.num_ranks)
    kernels, cluster = there.machine.kernels, there.cluster
    fastest = anywhere(there.machine).kernels
    pcgs = {id(own): own for own in lowered.pcgs if own.decisions.mesh == mesh}.values()
    walkers = [
        priced(own, cluster, own.decisions, request.optimizer, kernels).walker for own in pcgs
    ]
    asked = dict.fromkeys(what for walker in walkers for what in walker.exchanges.sent)
    sent = [what for what in asked if what[2] and mesh.size(what[1]) > 1]
    meshes = placements(mesh, cluster, patterns_of(sent))
    seconds = np.empty((len(meshes), len(sent)))
    for row, each in enumerate(meshes):
        walker = Walker({}, each, cluster, kernels)
        seconds[row] = [walker.exchange(*what).seconds for what in sent]
    rows = front(seconds)
    sending = np.zeros(len(rows))
    for own in pcgs:
        tasks = step_tasks(own, cluster, own.decisions, request.optimizer, fastest)
        sending += sending_ps(tasks, sent, seconds[rows])
    order = np.argsort(sending, kind="stable")[:SIMULATED]
    best, least_ps, simulated = found.plan, found.least_ps, 0
    for at in order if least_ps < best_ps else ():
        if best.step_ps <= least_ps * (1 + NEAR):
            break
        if meshes[rows[at]] == mesh:
            continue
        moved = replace(best, decisions=with_mesh(found.plan.decisions, meshes[rows[at]], mesh))
        elsewhere = on_meshes(lowered, moved.decisions)
        predicted = request.predict_stages(elsewhere, moved.decisions)
        simulated += 1
        if predicted.step_s < best.prediction.step_s:
            best = replace(moved, prediction=predicted)
    return Placed(
        best, least_ps, found.num_placements + len(meshes), found.num_simulated + simulated
    )


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


def best_placed(
    request: Request, found: Searched, again: Callable[[Request, SimulatedPlan], Searched], say: Say
) -> Searched:
    """What was searched as if a mesh lay where it is best for each collective, placed; where that
    is slower by more than a little, with faster plans that are searched `again`, at default prices.
    """
    laid = placed(request, found)
    expected, best = (min(own.proposals, key=rank, default=None) for own in (found, laid))
    ended = laid.status is not Status.COMPLETE
    if ended or not expected or not best or best.step_ps <= expected.step_ps * (1 + LOOSE):
        return laid
    say("no placement has all collectives where they are fastest: searching default meshes, too")
    more = placed(request, again(replace(request, budget=laid.work_left), best))
    status = laid.status if more.status is Status.COMPLETE else more.status
    proposals = sorted((*laid.proposals, *more.proposals), key=rank)
    return replace(laid, proposals=tuple(proposals), status=status, work_left=more.work_left)


def placed(request: Request, searched: Searched) -> Searched:
    """What was searched `anywhere`, as it lies: of each size of the axes and number of stages and
    of microbatches the fastest plan, as far as any placement of it may be faster than the best. One
    that is not placed yet when that is stopped lies by default.
    """
    looked: set[object] = set()
    sizes: set[int] = set()
    laid: list[SimulatedPlan] = []
    best_ps = inf
    status = searched.status
    try:
        for plan in sorted(searched.proposals, key=lambda plan: plan.step_ps):
            own = plan.decisions
            shapes = tuple(tuple(a.size for a in stage.mesh.axes) for stage in own.stages)
            kind = shapes, own.num_microbatches
            if kind not in looked and (len(looked) < LOGICAL or own.num_ranks not in sizes):
                looked.add(kind)
                sizes.add(own.num_ranks)
                laid.append(_laid_by_default(request, plan))
                if plan.step_ps < best_ps:
                    laid[-1] = place(request, laid[-1], best_ps).plan
                best_ps = min(best_ps, laid[-1].step_ps)
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
        if searched.proposals and not laid:
            laid = [_laid_by_default(request, min(searched.proposals, key=rank))]
    small = searched.smallest
    return replace(
        searched,
        proposals=tuple(sorted(laid, key=rank)),
        status=status,
        smallest=small and replace(small, prediction=_by_default(request, small.decisions)),
    )


def as_placed(request: Request, plan: SimulatedPlan, best_ps: float = inf) -> SimulatedPlan:
    """A plan that was searched `anywhere` where it is fastest; see `place`."""
    there = _laid_by_default(request, plan)
    return place(request, there, best_ps).plan if plan.step_ps < best_ps else there


def _laid_by_default(request: Request, plan: SimulatedPlan) -> SimulatedPlan:
    return replace(plan, prediction=_by_default(request, plan.decisions))


def _by_default(request: Request, decisions: Decisions) -> Prediction:
    return request.on(decisions.num_ranks).predict(decisions)


def patterns_of(sent: Sequence[Asked]) -> Sent:
    """What placements differ in, for collectives that go alike."""
    return tuple(sorted({(pattern_of(kind), axes) for kind, axes, _ in sent}))


def with_mesh(decisions: Decisions, mesh: Mesh, before: Mesh | None = None) -> Decisions:
    """The same decisions with all stages, or those on the mesh `before`, on `mesh`, which has the
    same axes.
    """
    stages = (
        replace(stage, mesh=mesh) if before in (None, stage.mesh) else stage
        for stage in decisions.stages
    )
    return replace(decisions, stages=tuple(stages))


def on_meshes(lowered: LoweredStages, decisions: Decisions) -> LoweredStages:
    """The same programs where the meshes of `decisions` lie, one object for equal ones."""
    pairs = [(own, stage.mesh) for own, stage in zip(lowered.pcgs, decisions.stages, strict=True)]
    moved = {(id(pcg), mesh): on_mesh(pcg, mesh) for pcg, mesh in pairs}
    return replace(lowered, pcgs=tuple(moved[id(pcg), mesh] for pcg, mesh in pairs))


def on_mesh(pcg: PCG, mesh: Mesh) -> PCG:
    """The program of a stage where `mesh` lies: layouts know sizes of axes only."""
    in_time = [axis for axis in pcg.mesh.axes if axis.steps]
    whole = replace(mesh, axes=(*mesh.axes, *in_time))
    return replace(pcg, decisions=with_mesh(pcg.decisions, mesh), mesh=whole)
