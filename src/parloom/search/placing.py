"""Lays a plan where its step is shortest: the second phase of the search for a placement.

Layouts do not depend on where a mesh lies, so the first phase looks at logical plans. Of one of
these, each collective priced as where it is fastest gives a step that no placement is expected to
undercut; where that is no better than the best plan so far, the plan is left as it is. Else
placements are simulated, but for those of which another is faster in all that the plan sends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from parloom.cost.embedding import WAYS
from parloom.cost.simulate import Simulator, step_tasks
from parloom.cost.step import priced
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions
from parloom.rewrite.rewrites import rewritten
from parloom.search.contexts import SimulatedPlan
from parloom.search.placements import Sent, placements
from parloom.search.request import Request

# Logical plans that are looked at.
LOGICAL = 6
# Placements of a plan that are simulated, those first that send fastest.
SIMULATED = 24
# How near to the step that no placement undercuts is near enough.
NEAR = 1e-4
ORDER = ("all_reduce", "all_to_all", "shift", "halo_exchange")


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
    sent = [(kind, axes, moved) for kind, axes, moved in walker.exchanges.sent if moved]
    meshes = placements(decisions.mesh, cluster, kinds_of(sent))
    seconds = np.empty((len(meshes), len(sent)))
    for row, mesh in enumerate(meshes):
        there = Walker({}, mesh, cluster, kernels)
        seconds[row] = [there.exchange(*what).seconds for what in sent]
    front = [meshes[row] for row in faster_somewhere(seconds)]
    least_ps = _least_ps(own, pcg, tuple(front))
    best, simulated = plan, 0
    for mesh in front[:SIMULATED] if least_ps < best_ps else ():
        if mesh == decisions.mesh:
            continue
        moved = on_mesh(pcg, mesh)
        found = own.machine.simulate(moved, moved.decisions, own.optimizer).prediction()
        simulated += 1
        if found.step_s < best.prediction.step_s:
            best = SimulatedPlan(with_mesh(decisions, mesh), found)
        if best.step_ps <= least_ps * (1 + NEAR):
            break
    return Placed(best, least_ps, len(meshes), simulated)


def faster_placed(
    request: Request, plans: Sequence[SimulatedPlan]
) -> Iterator[tuple[SimulatedPlan, SimulatedPlan]]:
    """Plans of one stage, the fastest first, and the same where they are faster: of each size of
    the axes and number of microbatches the fastest one, as far as any placement of it may be
    faster than the best.
    """
    best_ps = min((plan.step_ps for plan in plans), default=inf)
    looked: set[object] = set()
    for plan in sorted(plans, key=lambda plan: plan.step_ps):
        if len(plan.decisions.stages) > 1 or len(looked) >= LOGICAL:
            continue
        sizes = tuple(axis.size for axis in plan.decisions.mesh.axes)
        kind = sizes, plan.decisions.num_microbatches
        if kind in looked:
            continue
        looked.add(kind)
        found = place(request, plan, best_ps).plan
        if found is not plan:
            best_ps = min(best_ps, found.step_ps)
            yield plan, found


def kinds_of(sent: list[tuple[str, tuple[str, ...], float]]) -> Sent:
    """What placements differ in, for collectives that go alike."""
    names = {(WAYS.get(kind, "ring"), axes) for kind, axes, _ in sent}
    alike = {WAYS.get(kind, "ring"): kind for kind in reversed(ORDER)}
    return tuple(sorted((alike[name], axes) for name, axes in names))


def faster_somewhere(seconds: np.ndarray) -> list[int]:
    """Rows that no other undercuts or equals, one of those that are equal; the least sum first."""
    kept: list[int] = []
    for row in np.argsort(seconds.sum(axis=1), kind="stable"):
        if not any((seconds[other] <= seconds[row]).all() for other in kept):
            kept.append(int(row))
    return kept


def with_mesh(decisions: Decisions, mesh: Mesh) -> Decisions:
    """The same decisions of one stage on another mesh of the same axes."""
    (stage,) = decisions.stages
    return replace(decisions, stages=(replace(stage, mesh=mesh),))


def on_mesh(pcg: PCG, mesh: Mesh) -> PCG:
    """The same program where `mesh` lies: layouts know sizes of axes only."""
    in_time = [axis for axis in pcg.mesh.axes if axis.steps]
    whole = replace(mesh, axes=(*mesh.axes, *in_time))
    return replace(pcg, decisions=with_mesh(pcg.decisions, mesh), mesh=whole)


def _least_ps(request: Request, pcg: PCG, meshes: tuple[Mesh, ...]) -> float:
    kernels = request.machine.kernels
    tasks = step_tasks(pcg, request.cluster, pcg.decisions, request.optimizer, kernels, meshes)
    return float(Simulator().play(tasks).step_ps)
