"""The search over all meshes: what is proposed, and what is proved.

Every logical mesh has a program of its own (`master`); what it finds is lowered, and where the peak
of its step is above the limit, storage and recomputation are chosen again under a limit that is
lower by as much. Proposals are ordered by their simulated steps, not by what the search counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from parloom.cost.kernels import Kernels
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Menu
from parloom.search.closing import TOLERANCE, close
from parloom.search.conflicts import meshes_of
from parloom.search.layouts import LayoutProblem
from parloom.search.master import Found, MeshSearch
from parloom.search.pinned import NONE, Pinned
from parloom.search.polish import Candidate, decisions, least_bytes, polish, uniform
from parloom.search.prices import Known
from parloom.search.program import Program, program_of
from parloom.search.refine import Tally, kept, refinements, undercut
from parloom.search.single import Single
from parloom.search.streams import least_compute_ps, least_step_ps
from parloom.search.sums import Worth
from parloom.search.trust import Trust
from parloom.search.work import OutOfWorkError, Work

Say = Callable[[str], None]
# Layouts of each mesh that are simulated.
LAYOUTS = 3
TRIES = 5
# The share of the memory within which the largest limit is sought that fits.
CLOSE = 0.02
# Of the estimates that are above the best by this share at most, how many are simulated.
NEARBY, PLAYED_NEARBY = 0.003, 8
# How often the bound of a mesh is brought near the best answer, and that played.
CLOSED = 3
# The share by which computing alone is below the best estimate where finer meshes are searched, and
# by which a finer mesh must be better.
WORTHWHILE, BETTER = 0.02, 0.005
# Bounds are sums of floating-point numbers, estimates of integers.
ROUNDING = 1e-9
# After so many in a row that are not, others are not looked at.
IN_VAIN = 2
# Weight, gradient and optimizer state in chunks, of all weights alike: ZeRO 3, 2, 1 and 0.
ALIKE = ((True, True, True), (False, True, True), (False, False, True), (False, False, False))


@dataclass(frozen=True)
class Proposal:
    """A plan with its simulated step and its estimate."""

    decisions: Decisions
    step_ps: int
    estimate_ps: int


@dataclass(frozen=True)
class Searched:
    """Proposals, the fastest first; what no plan of the space undercuts, and what
    no estimate undercuts; and whether the search was interrupted, or used up its budget.
    """

    proposals: tuple[Proposal, ...]
    bound_ps: int
    estimate_bound_ps: float
    interrupted: bool = False
    exhausted: bool = False

    @property
    def solver_gap(self) -> float | None:
        """(Best estimate - its bound) / its bound; None where nothing was found or not all was
        searched.
        """
        if not self.proposals or self.interrupted or self.exhausted:
            return None
        if self.estimate_bound_ps <= 0:
            return None
        best = min(p.estimate_ps for p in self.proposals)
        gap = best / self.estimate_bound_ps - 1
        return 0.0 if abs(gap) < ROUNDING else gap


def search(
    graph: Graph,
    cluster: Cluster,
    base: Decisions,
    optimizer: Optimizer,
    limit_bytes: int,
    say: Say,
    kernels: Kernels | None = None,
    *,
    pinned: Pinned = NONE,
    budget: int | None = None,
) -> Searched:
    """Plans of `graph` on `cluster` under `limit_bytes` a device, with the dtypes of `base`.

    Ctrl-C ends the search with what it has, and so does `budget` (see `Work`).
    """
    factored = factorize(graph)
    program = program_of(graph, factored, pinned)
    meshes = tuple(meshes_of(cluster, pinned, factored))
    hunt = _Hunt(program, base, optimizer, limit_bytes, say, Work(budget))
    interrupted = exhausted = False
    try:
        try:
            hunt.run(meshes, cluster, kernels)
        except OutOfWorkError:
            exhausted = True
            hunt.bound(meshes[len(hunt.least) :], cluster, kernels)
    except KeyboardInterrupt:
        interrupted = True
    proposals = sorted(hunt.proposals, key=lambda p: p.step_ps)
    # What was not looked at may be less.
    least = 0 if interrupted else min(hunt.least, default=0)
    return Searched(tuple(proposals), least, hunt.estimate_bound, interrupted, exhausted)


class _Hunt:
    """The search over all meshes: every mesh is searched, the best of each is played at once where
    it promises more than what was found so far, and what else promises as much in the end.
    """

    def __init__(
        self,
        program: Program,
        base: Decisions,
        optimizer: Optimizer,
        limit_bytes: int,
        say: Say,
        work: Work,
    ) -> None:
        self.program, self.base, self.optimizer = program, base, optimizer
        self.limit_bytes, self.say, self.work = limit_bytes, say, work
        # What may be counted such that the peak of a step fits, where that was found to be less.
        self.enough = inf
        self.trust = Trust()
        self.shared = Known()
        self.proposals: list[Proposal] = []
        self.least: list[int] = []
        # What no estimate is below on finer meshes that were not searched.
        self.undercut: list[tuple[float, LayoutProblem]] = []
        self.estimate_bound = 0.0
        # The choices of an operator that were kept on finer meshes at least, and all that one has.
        self.kept, self.largest = 0, 0

    def run(self, meshes: Iterable[Mesh], cluster: Cluster, kernels: Kernels | None) -> None:
        searched: list[_OnMesh] = []
        for mesh in meshes:
            problem = self._problem(mesh, cluster, kernels)
            self.least.append(least_compute_ps(problem))
            on_mesh = _OnMesh(
                problem, cluster, self.base, self.optimizer, self.limit_bytes, self.trust
            )
            searched.append(on_mesh)
            on_mesh.begin(self.enough)
            self._play(on_mesh, 1)
            self.enough = min(self.enough, on_mesh.enough)
            self._tell(on_mesh)
        self._refine(searched, cluster, kernels)
        searched.sort(key=lambda on_mesh: on_mesh.promise_ps)
        for on_mesh in searched:
            self._play(on_mesh, LAYOUTS)
        if self.proposals:
            self._add(min(searched, key=lambda on_mesh: on_mesh.step_ps).fuller())
        for on_mesh in searched:
            self._close(on_mesh)
        if self.proposals:
            fastest = min(searched, key=lambda on_mesh: on_mesh.step_ps)
            self._add(fastest.nearby(NEARBY))
            self._add(fastest.fuller())
            self._close(fastest)
        bounds = (*(b for b, _ in self.undercut), *(o.found.bound_ps for o in searched))
        self.estimate_bound = min(bounds, default=0.0)
        least: list[int] = []
        for problem in (*(o.problem for o in searched), *(p for _, p in self.undercut)):
            least.append(least_step_ps(problem, min(least, default=inf)))
        self.least = least

    def _refine(self, searched: list["_OnMesh"], cluster: Cluster, kernels: Kernels | None) -> None:
        """Search meshes with an axis of the best one cut in two, and go on from what is better."""
        tally = Tally()
        new, parent = tuple(searched), min(searched, key=_rank, default=None)
        while parent is not None and refinements(parent.problem.mesh):
            if min(self.least) >= parent.promise_ps * (1 - WORTHWHILE):
                break  # next to nothing but computing, which takes as long on any mesh
            for on_mesh in new:
                if on_mesh.found.candidates:
                    tally.add(on_mesh.search)
            found: list[_OnMesh | None] = []
            for mesh in refinements(parent.problem.mesh):
                if found[-IN_VAIN:] == [None] * IN_VAIN:
                    break
                if self.program.pinned.allows_mesh(mesh):
                    found.append(self._finer(mesh, parent, tally, cluster, kernels))
            new = tuple(on_mesh for on_mesh in found if on_mesh is not None)
            searched += new
            promise = parent.promise_ps * (1 - BETTER)
            parent = min((o for o in new if o.promise_ps < promise), key=_rank, default=None)
        if self.kept:
            self.say(
                f"on finer meshes, an operator had its {self.kept} most promising choices, of up to"
                f" {self.largest}"
            )

    def _finer(
        self,
        mesh: Mesh,
        parent: "_OnMesh",
        tally: Tally,
        cluster: Cluster,
        kernels: Kernels | None,
    ) -> "_OnMesh | None":
        """The search on a finer mesh; None where it has nothing that is better."""
        keep = kept(self.program, Single(self.program.graph, self.program.factored, mesh), tally)
        if not all(keep.menus):
            return None  # pins leave nothing
        if keep.most < keep.largest:
            self.kept = min(self.kept or keep.most, keep.most)
            self.largest = max(self.largest, keep.largest)
        problem = self._problem(mesh, cluster, kernels, keep.menus)
        self.least.append(least_compute_ps(problem))
        limit = min(float(self.limit_bytes), self.enough)
        enough = parent.promise_ps * (1 - BETTER)
        bound = undercut(MeshSearch(problem, limit), parent.search.worth, enough)
        if bound >= enough:
            self.undercut.append((bound, problem))
            self.say(f"mesh {_sizes(mesh)}: no estimate below {bound / 1e12:.4g} s")
            return None
        on_mesh = _OnMesh(
            problem,
            cluster,
            self.base,
            self.optimizer,
            self.limit_bytes,
            self.trust,
            limit,
            parent.search.worth,
        )
        on_mesh.begin(self.enough)
        self._play(on_mesh, 1)
        self.enough = min(self.enough, on_mesh.enough)
        self._tell(on_mesh)
        return on_mesh

    def _close(self, on_mesh: "_OnMesh") -> None:
        """Prove that a mesh has nothing that is estimated to be better, or find it."""
        for _ in range(CLOSED):
            best = min((p.estimate_ps for p in self.proposals), default=inf)
            if best == inf or not on_mesh.close(best, self.enough):
                break
            self._play(on_mesh, LAYOUTS)
            self.enough = min(self.enough, on_mesh.enough)

    def bound(self, meshes: Iterable[Mesh], cluster: Cluster, kernels: Kernels | None) -> None:
        """What no plan on meshes that were not searched undercuts."""
        problems = (self._problem(mesh, cluster, kernels) for mesh in meshes)
        self.least += map(least_compute_ps, problems)

    def _problem(
        self,
        mesh: Mesh,
        cluster: Cluster,
        kernels: Kernels | None,
        menus: Sequence[Menu] = (),
    ) -> LayoutProblem:
        return LayoutProblem(
            self.program,
            Walker({}, mesh, cluster, kernels),
            self.base,
            self.optimizer,
            menus=menus,
            shared=self.shared,
            work=self.work,
        )

    def _play(self, on_mesh: "_OnMesh", count: int) -> None:
        """Simulate the `count` best layouts of a mesh, where they promise to be among the best."""
        if self.trust.promises(on_mesh.promise_ps):
            self._add(on_mesh.proposals(count))

    def _add(self, found: Iterable[Proposal]) -> None:
        known = {p.decisions for p in self.proposals}
        self.proposals += [p for p in found if p.decisions not in known]

    def _tell(self, on_mesh: "_OnMesh") -> None:
        sizes = _sizes(on_mesh.problem.mesh)
        if not on_mesh.found.candidates:
            self.say(f"mesh {sizes}: nothing fits")
            return
        estimate = f"estimated {on_mesh.promise_ps / 1e12:.4g} s"
        least = f"no estimate below {on_mesh.found.bound_ps / 1e12:.4g} s"
        best = 0 if self.trust.best_ps == inf else self.trust.best_ps
        bound = min(self.least)
        so_far = f"best so far {best / 1e12:.4g} s, bound {bound / 1e12:.4g} s"
        gap = f"gap {best / bound - 1:.1%}" if best and bound else "no gap yet"
        self.say(f"mesh {sizes}: {estimate}, {least}; {so_far}, {gap}")


@dataclass(frozen=True, eq=False)
class _Fit:
    """A candidate as a plan, its simulated step, and by how much the peak is above the limit."""

    candidate: Candidate
    decisions: Decisions
    step_ps: int
    excess_bytes: int

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.decisions, self.step_ps, self.candidate.sums.step_ps)


class _OnMesh:
    """The search on one mesh."""

    def __init__(
        self,
        problem: LayoutProblem,
        cluster: Cluster,
        base: Decisions,
        optimizer: Optimizer,
        limit_bytes: int,
        trust: Trust,
        counted: float = inf,
        worth: Worth | None = None,
    ) -> None:
        self.problem, self.cluster, self.base, self.optimizer = problem, cluster, base, optimizer
        self.limit_bytes, self.trust = limit_bytes, trust
        self.played: dict[Candidate, _Fit] = {}
        self.limit, self.enough = float(limit_bytes), inf
        self.asked = 0.0, 0.0  # what the bound was brought near to, under which limit
        self.found: Found
        self.worth = worth
        self._search(min(self.limit, counted))

    def begin(self, enough: float) -> None:
        """Take it from other meshes how much may be counted."""
        self.enough = enough
        if enough < self.limit:
            self._search(enough)

    def close(self, best_ps: float, enough: float) -> bool:
        """Bring the bound near `best_ps`, under what may be counted as the plans that fit showed;
        whether that was needed.
        """
        fit = (f.candidate.sums.held_bytes for f in self.played.values() if f.excess_bytes <= 0)
        limit = max(min(self.limit, self.enough, enough), max(fit, default=0.0))
        near = best_ps * (1 - TOLERANCE)
        if (self.found.bound_ps >= near and limit <= self.limit) or self.asked == (best_ps, limit):
            return False
        self.asked = best_ps, limit
        if limit != self.limit:
            self._search(limit)
        if self.found.bound_ps < near:
            self.found = close(self.search, best_ps)
        return True

    def _search(self, limit: float) -> None:
        """Search under a limit on what the search counts."""
        self.limit, self.search = limit, MeshSearch(self.problem, limit, worth=self.worth)
        self.found = self.search.run()

    @property
    def step_ps(self) -> float:
        """The fastest step of those played that fit."""
        return min((fit.step_ps for fit in self._fitting()), default=inf)

    @property
    def promise_ps(self) -> float:
        """The best estimate."""
        return min((c.sums.step_ps for c in self.found.candidates), default=inf)

    def proposals(self, count: int) -> Iterator[Proposal]:
        """The plans that fit, for the `count` layouts with the best estimates.

        What a step needs beyond what the search counts (buffers, what lives for a moment), or less
        than that (what is shared), is found out by simulating: the search is told of another limit.
        """
        fitting: list[_Fit] = []
        for _ in range(TRIES):
            promising = [
                candidate
                for candidate in self.found.candidates[:count]
                if self.trust.promises(candidate.sums.step_ps)
            ]
            tried = list(
                dict.fromkeys(f for c in promising for f in self._fits(c.values, count > 1))
            )
            fitting += [fit for fit in tried if fit.excess_bytes <= 0]
            if not tried or not self._correct(tried):
                break
        for fit in dict.fromkeys(fitting):
            yield fit.proposal

    def _correct(self, tried: Sequence[_Fit]) -> bool:
        """Search again under a limit as the peaks of `tried` ask for; whether that was needed."""
        excess = min(fit.excess_bytes for fit in tried)
        if excess > 0:
            counted = min(fit.candidate.sums.held_bytes for fit in tried)
            lower = min(self.limit, counted) - excess
            self._search(lower if lower > 0 else self.limit / 2)
            return True
        spare = -max(fit.excess_bytes for fit in tried)
        if self.limit < self.limit_bytes or not self.search.worth.held:
            return False  # memory does not matter, or was found to be just enough
        if spare < CLOSE * self.limit_bytes:
            return False
        self._search(self.limit + spare)
        return True

    def nearby(self, share: float) -> Iterator[Proposal]:
        """Plans whose estimates are nearly as good as the best: which is the fastest, only
        simulation says.
        """
        near = list(self.search.nearby(self.found, share)[:PLAYED_NEARBY])
        near += [uniform(self.problem, c, stored) for c in near[:1] for stored in ALIKE]
        for candidate in near:
            if not self.trust.promises(candidate.sums.step_ps):
                continue
            fit = self._play(candidate)
            if fit.excess_bytes <= 0:
                yield fit.proposal

    def fuller(self) -> Iterator[Proposal]:
        """The layouts of the fastest plan with as much kept as fits: the limit on what is counted
        may have been learnt from plans that need more beyond it.
        """
        fit = min(self._fitting(), key=lambda fit: fit.step_ps)
        spare = -fit.excess_bytes
        for _ in range(TRIES):
            if spare < CLOSE * self.limit_bytes:
                return
            held = fit.candidate.sums.held_bytes
            candidate = polish(self.problem, fit.candidate.values, held + spare)
            if candidate is None or not self.trust.promises(candidate.sums.step_ps):
                return
            tried = self._play(candidate)
            if tried.excess_bytes > 0 or tried is fit:
                spare //= 2
                continue
            yield tried.proposal
            fit, spare = tried, -tried.excess_bytes

    def _fits(self, values: Sequence[int], frugal: bool) -> list[_Fit]:
        """Layouts with storage and recomputation such that the peak of the step fits, or nearly.

        What a step needs beyond what the search counts depends on what is stored how: the limit is
        sought that leaves just enough for it. Where `frugal`, storage is chosen once more with
        that, frugally.
        """
        fits: list[_Fit] = []
        limit = min(max(self.limit, self.limit_bytes), self.enough)
        least, under, over, good = least_bytes(self.problem, values), 0.0, inf, limit
        for _ in range(TRIES):
            candidate = polish(self.problem, values, limit)
            if candidate is None:
                break
            fits.append(self._play(candidate))
            excess, held = fits[-1].excess_bytes, candidate.sums.held_bytes
            if excess <= 0:
                under, good = held, limit
            else:
                over = min(over, held)
            if over == inf or over - under < CLOSE * self.limit_bytes or over <= least:
                break
            limit = (under + over) / 2 if under else max(over - excess, least + 1.0)
        if under and over < inf:
            self.enough = good
        thrifty = polish(self.problem, values, good, frugal=True) if frugal else None
        if thrifty and self.trust.promises(thrifty.sums.step_ps):
            fits.append(self._play(thrifty))
        return fits

    def _fitting(self) -> Iterator[_Fit]:
        return (fit for fit in self.played.values() if fit.excess_bytes <= 0)

    def _play(self, candidate: Candidate) -> _Fit:
        if candidate not in self.played:
            self.problem.work.spend()
            self.played[candidate] = self._simulated(candidate)
            fit = self.played[candidate]
            self.trust.saw(candidate.sums.step_ps, fit.step_ps, fits=fit.excess_bytes <= 0)
        return self.played[candidate]

    def _simulated(self, candidate: Candidate) -> _Fit:
        plan = decisions(self.problem, candidate, self.base)
        pcg = lower(self.problem.program.graph, plan, factored=self.problem.program.factored)
        kernels = self.problem.prices.walker.kernels
        played = simulate(pcg, self.cluster, plan, self.optimizer, kernels)
        return _Fit(candidate, plan, played.step_ps, played.peak_bytes - self.limit_bytes)


def _rank(on_mesh: _OnMesh) -> tuple[float, float]:
    return on_mesh.step_ps, on_mesh.promise_ps


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
