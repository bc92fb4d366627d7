"""The search over all meshes: what is proposed, and what is proved.

Every logical mesh has a program of its own (`master`); what it finds is lowered, and where the peak
of its step is above the limit, storage and recomputation are chosen again under a limit that is
lower by as much. Proposals are ordered by their simulated steps, not by what the search counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.conflicts import meshes_of
from parloom.search.layouts import LayoutProblem
from parloom.search.master import MeshSearch
from parloom.search.pinned import NONE, Pinned
from parloom.search.polish import Candidate, decisions, polish
from parloom.search.prices import BACKWARD, FORWARD
from parloom.search.program import Program, program_of

Say = Callable[[str], None]
# Layouts of each mesh that are simulated.
LAYOUTS = 3
TRIES = 6


@dataclass(frozen=True)
class Proposal:
    """A plan with its simulated step, its estimate, and what no estimate on its mesh undercuts."""

    decisions: Decisions
    step_ps: int
    estimate_ps: int
    bound_ps: float


@dataclass(frozen=True)
class Searched:
    """Proposals, the fastest first; what no plan of the space undercuts (computing alone); and
    whether the search was interrupted.
    """

    proposals: tuple[Proposal, ...]
    bound_ps: int
    interrupted: bool = False

    @property
    def solver_gap(self) -> float | None:
        """(Best estimate - the least bound of a mesh) / bound; None where nothing was found."""
        if not self.proposals or not self.bound_ps:
            return None
        best = min(p.estimate_ps for p in self.proposals)
        return max(0.0, best - min(p.bound_ps for p in self.proposals)) / self.bound_ps


def search(
    graph: Graph,
    cluster: Cluster,
    base: Decisions,
    optimizer: Optimizer,
    limit_bytes: int,
    say: Say,
    kernels: Kernels | None = None,
    pinned: Pinned = NONE,
) -> Searched:
    """Plans of `graph` on `cluster` under `limit_bytes` a device, with the dtypes of `base`.

    Ctrl-C ends the search with what it has.
    """
    factored = factorize(graph)
    program = program_of(graph, factored, pinned)
    proposals: list[Proposal] = []
    bounds: list[int] = []
    interrupted = False
    for mesh in meshes_of(cluster, pinned, factored):
        try:
            on_mesh = _OnMesh(program, mesh, cluster, base, optimizer, limit_bytes, kernels)
            found = tuple(on_mesh.proposals())
        except KeyboardInterrupt:
            interrupted = True
            break
        bounds.append(on_mesh.least_compute_ps())
        proposals += found
        sizes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
        if found:
            best = min(found, key=lambda proposal: proposal.step_ps)
            estimate, least = best.estimate_ps / 1e12, best.bound_ps / 1e12
            line = f"simulated {best.step_ps / 1e12:.4g} s, estimated {estimate:.4g} s"
            say(f"mesh {sizes}: {line} where none is below {least:.4g} s")
        else:
            say(f"mesh {sizes}: nothing fits")
    proposals.sort(key=lambda p: p.step_ps)
    return Searched(tuple(proposals), min(bounds, default=0), interrupted)


@dataclass(frozen=True)
class _Fit:
    """A candidate as a plan, its simulated step, and by how much the peak is above the limit."""

    candidate: Candidate
    decisions: Decisions
    step_ps: int
    excess_bytes: int


class _OnMesh:
    """The search on one mesh."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        cluster: Cluster,
        base: Decisions,
        optimizer: Optimizer,
        limit_bytes: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.cluster, self.base, self.optimizer = cluster, base, optimizer
        self.kernels = kernels
        self.limit_bytes = limit_bytes
        self.factored: Factored = program.factored
        self.problem = LayoutProblem(program, Walker({}, mesh, cluster, kernels), base, optimizer)

    def proposals(self) -> Iterator[Proposal]:
        """The plans that fit, for the layouts with the best estimates.

        What a step needs beyond what the search counts (buffers, what lives for a moment) is found
        out by simulating; where it is too much, the search is told of a lower limit.
        """
        limit, bound_ps = float(self.limit_bytes), 0.0
        fitting: list[_Fit] = []
        for _ in range(TRIES):
            found = MeshSearch(self.problem, limit).run()
            bound_ps = bound_ps or found.bound_ps
            tried = [
                fit
                for candidate in found.candidates[:LAYOUTS]
                for frugal in (False, True)
                if (fit := self._fit(candidate.values, frugal=frugal)) is not None
            ]
            fitting = [fit for fit in tried if fit.excess_bytes <= 0]
            if fitting or not tried:
                break
            counted = min(f.candidate.sums.held_bytes for f in tried)
            limit = min(limit, counted) - min(f.excess_bytes for f in tried)
        for fit in fitting:
            yield Proposal(fit.decisions, fit.step_ps, fit.candidate.sums.step_ps, bound_ps)

    def _fit(self, values: Sequence[int], *, frugal: bool) -> _Fit | None:
        """Layouts with storage and recomputation such that the peak of the step fits, or nearly."""
        limit = float(self.limit_bytes)
        fit: _Fit | None = None
        for _ in range(TRIES):
            candidate = polish(self.problem, values, limit, frugal=frugal)
            if candidate is None:
                break
            fit = self._play(candidate)
            if fit.excess_bytes <= 0:
                break
            limit = min(limit, candidate.sums.held_bytes) - fit.excess_bytes
        return fit

    def _play(self, candidate: Candidate) -> _Fit:
        plan = decisions(self.problem, candidate, self.base)
        pcg = lower(self.problem.program.graph, plan, factored=self.factored)
        played = simulate(pcg, self.cluster, plan, self.optimizer, self.kernels)
        return _Fit(candidate, plan, played.step_ps, played.peak_bytes - self.limit_bytes)

    def least_compute_ps(self) -> int:
        """What the compute stream does at least, whatever is chosen for each operator."""
        total = 0
        for parts in self.problem.operators:
            total += int((parts[:, FORWARD] + parts[:, BACKWARD]).min())
        return total
