"""The search over all meshes: what is proposed, and what is proved.

Every logical mesh has a program of its own (`master`); what it finds is lowered, and where the peak
of its step is above the limit, or well below, everything is chosen again under another limit on
what is counted. Proposals are ordered by their simulated steps, not by what the search counts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from parloom.cost.units import format_seconds
from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.mesh import Mesh, PrimeAxis
from parloom.ir.plan import Decisions
from parloom.search.choices import Menu
from parloom.search.closing import TOLERANCE
from parloom.search.conflicts import meshes_of
from parloom.search.finer import refinements
from parloom.search.layouts import LayoutProblem
from parloom.search.least import least_share
from parloom.search.master import MeshSearch
from parloom.search.meshes import MAX_AXES, joined
from parloom.search.on_mesh import Fit, OnMesh, Proposal
from parloom.search.prices import Known
from parloom.search.program import Program, program_of
from parloom.search.question import Question, Say, Wanted
from parloom.search.refine import Tally, kept
from parloom.search.single import Single
from parloom.search.streams import least_compute_ps, least_step_ps
from parloom.search.trust import Trust
from parloom.search.work import OutOfWorkError, Work

# Layouts of each mesh that are simulated.
LAYOUTS = 3
# Of the estimates that are above the best by this share at most, some are simulated.
NEARBY = 0.003
# How often the bound of a mesh is brought near the best answer, and that played.
CLOSED = 3
# The share by which computing alone is below the best estimate where finer meshes are searched, and
# by which a finer mesh must be better.
WORTHWHILE, BETTER = 0.02, 0.005
# Bounds are sums of floating-point numbers, estimates of integers.
ROUNDING = 1e-6
# After so many in a row that are not, others are not looked at.
IN_VAIN = 2


@dataclass(frozen=True)
class Searched:
    """Proposals, the fastest first; what no plan of the space undercuts, and what
    no estimate undercuts; whether the search was interrupted, or used up its budget; what was
    left out, so that bounds do not hold for it, in words; and the smallest of all that was
    simulated, whether it fits or not.
    """

    proposals: tuple[Proposal, ...]
    bound_ps: int
    estimate_bound_ps: float
    interrupted: bool = False
    exhausted: bool = False
    left_out: str = ""
    smallest: Proposal | None = None

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


def search(question: Question, base: Decisions, say: Say) -> Searched:
    """Plans that answer `question`, with the dtypes of `base`.

    Ctrl-C ends the search with what it has, and so does a budget (see `Work`).
    """
    graph, cluster, pinned = question.graph, question.cluster, question.pinned
    if least_share(graph, base, question.optimizer, cluster.num_devices) > question.limit_bytes:
        say("nothing fits: weights and their states alone take more than all devices may hold")
        return Searched((), 0, inf)
    try:
        factored = factorize(graph)
        program = program_of(graph, factored, pinned)
        meshes = tuple(meshes_of(cluster, pinned, factored))
    except KeyboardInterrupt:
        return Searched((), 0, inf, interrupted=True)
    hunt = _Hunt(question, base, program, say)
    interrupted = exhausted = False
    try:
        try:
            hunt.run(meshes)
        except OutOfWorkError:
            exhausted = True
            hunt.bound(meshes[len(hunt.least) :])
    except KeyboardInterrupt:
        interrupted = True
    fitting = {fit.decisions: fit.proposal for fit in hunt.fitting()}
    played = (fit for on_mesh in hunt.searched for fit in on_mesh.played.values())
    small = min(played, key=lambda fit: (fit.excess_bytes, fit.step_ps), default=None)
    return Searched(
        tuple(sorted(fitting.values(), key=lambda p: p.prediction.step_s)),
        # What was not looked at may be less.
        0 if interrupted else min(hunt.least, default=0),
        hunt.estimate_bound,
        interrupted,
        exhausted,
        hunt.left_out,
        small.proposal if small else None,
    )


class _Hunt:
    """The search over all meshes: every mesh is searched, the best of each is played at once where
    it promises more than what was found so far, and what else promises as much in the end.
    """

    def __init__(self, question: Question, base: Decisions, program: Program, say: Say) -> None:
        self.question, self.base, self.program, self.say = question, base, program, say
        self.work = Work(question.budget)
        # What may be counted such that the peak of a step fits, where that was found to be less.
        self.enough = inf
        self.trust = Trust()
        self.shared = Known()
        self.searched: list[OnMesh] = []
        self.least: list[int] = []
        # Of meshes that were not searched: what proves that nothing on them is better.
        self.undercut: list[MeshSearch] = []
        self.estimate_bound = 0.0
        # The choices of an operator that were kept on finer meshes at least, and all that one has.
        self.kept, self.largest = 0, 0

    def run(self, meshes: Iterable[Mesh]) -> None:
        for mesh in meshes:
            self._begin(mesh)
        if self.question.wanted is not Wanted.PRICE:
            self._refine()
        self.searched.sort(key=lambda on_mesh: on_mesh.promise_ps)
        for on_mesh in self.searched:
            self._play(on_mesh, LAYOUTS)
        if self.any_fits():
            self._improve()
        held = self._held()
        bounds = [on_mesh.bound_ps(self.enough, held) for on_mesh in self.searched]
        bounds += (self._bound(search, held) for search in self.undercut)
        self.estimate_bound = min(bounds, default=0.0)
        if self.any_fits() and self.question.wanted is Wanted.PROOF:
            problems = [on_mesh.problem for on_mesh in self.searched]
            problems += (search.problem for search in self.undercut)
            least: list[int] = []
            for problem in problems:
                least.append(least_step_ps(problem, min(least, default=inf)))
            self.least = least

    def _begin(self, mesh: Mesh) -> None:
        """Search a mesh with all choices and play the best; where nothing fits so far, only if its
        smallest plan leaves room.
        """
        problem = self._problem(mesh, self._kept(mesh, self._coarser(mesh)))
        self.least.append(least_compute_ps(problem))
        last = self.searched[-1].search.worth if self.searched and not self.any_fits() else None
        on_mesh = OnMesh(problem, self.question, self.base, self.trust, last)
        self.searched.append(on_mesh)
        if last is None or self._has_room(on_mesh):
            self._search(on_mesh)
        if last is None and not self.any_fits() and self._has_room(on_mesh) and self.any_fits():
            self._search(on_mesh)
        self._tell(on_mesh)

    def _has_room(self, on_mesh: OnMesh) -> bool:
        """Whether the smallest plan fits, or others may that are counted as less than there is."""
        fit = on_mesh.smallest()
        limit = self.question.limit_bytes
        return fit is not None and (fit.obeys or fit.held_bytes <= limit)

    def _search(self, on_mesh: OnMesh) -> None:
        """Search a mesh, and play the best on it."""
        on_mesh.begin(self.enough)
        self._play(on_mesh, 1)
        self.enough = min(self.enough, on_mesh.enough)

    def _refine(self) -> None:
        """Search meshes with an axis of the best one cut in two, and go on from what is better."""
        tally = Tally()
        new, parent = tuple(self.searched), min(self.searched, key=_rank, default=None)
        while parent is not None and parent.promise_ps < inf:
            if min(self.least) >= parent.promise_ps * (1 - WORTHWHILE):
                break  # next to nothing but computing, which takes as long on any mesh
            known = {_cuts(on_mesh.problem.mesh) for on_mesh in self.searched}
            finer = [m for m in refinements(parent.problem.mesh) if _cuts(m) not in known]
            if not finer:
                break
            for on_mesh in new:
                if on_mesh.found.candidates:
                    tally.add(on_mesh.search)
            found: list[OnMesh | None] = []
            for mesh in finer:
                if found[-IN_VAIN:] == [None] * IN_VAIN:
                    break
                if self.program.pinned.allows_mesh(mesh):
                    found.append(self._finer(mesh, parent, tally))
            new = tuple(on_mesh for on_mesh in found if on_mesh is not None)
            promise = parent.promise_ps * (1 - BETTER)
            parent = min((o for o in new if o.promise_ps < promise), key=_rank, default=None)

    @property
    def left_out(self) -> str:
        """What was not looked at on finer meshes, as far as bounds depend on it."""
        if not self.kept:
            return ""
        return (
            f"on meshes of three axes and more, an operator had its {self.kept} most promising"
            f" choices, of up to {self.largest}; bounds are of these"
        )

    def _finer(self, mesh: Mesh, parent: OnMesh, tally: Tally) -> OnMesh | None:
        """The search on a finer mesh; None where it has nothing that is better."""
        menus = self._kept(mesh, tally)
        if not all(menus):
            return None  # pins leave nothing
        problem = self._problem(mesh, menus)
        self.least.append(least_compute_ps(problem))
        limit = min(float(self.question.limit_bytes), self.enough)
        enough = parent.reached_ps * (1 - BETTER)
        search = MeshSearch(problem, max(limit, self._held()))
        if search.prove(parent.search.worth, enough) >= enough:
            self.undercut.append(search)
            self.say(f"mesh {_sizes(mesh)}: no estimate below {_seconds(search.bound)}")
            return None
        on_mesh = OnMesh(problem, self.question, self.base, self.trust, parent.search.worth)
        self.searched.append(on_mesh)
        self._search(on_mesh)
        self._tell(on_mesh)
        return on_mesh

    def _coarser(self, mesh: Mesh) -> Tally | None:
        """What coarser meshes say of one of three axes and more, which pins ask for; their axes
        have other names, so pins say nothing there.
        """
        if len(mesh.axes) <= MAX_AXES:
            return None
        tally, free = Tally(), program_of(self.program.graph, self.program.factored)
        for coarse in joined(mesh):
            search = MeshSearch(self._problem(coarse, program=free), self.question.limit_bytes)
            if search.run().candidates:
                tally.add(search)
        return tally

    def _kept(self, mesh: Mesh, tally: Tally | None) -> Sequence[Menu]:
        """The choices on a mesh that `tally` says are cheap; without one, all (no menus)."""
        if tally is None:
            return ()
        keep = kept(self.program, Single(self.program.graph, self.program.factored, mesh), tally)
        if keep.most < keep.largest:
            self.kept = min(self.kept or keep.most, keep.most)
            self.largest = max(self.largest, keep.largest)
        return keep.menus

    def _improve(self) -> None:
        """What is better than the fastest plan, or near it in its estimate, and that there is no
        more.
        """
        self._fastest().fuller()
        if self.question.wanted is Wanted.PRICE:
            return
        for on_mesh in self.searched:
            self._close(on_mesh)
        fastest = self._fastest()
        fastest.nearby(NEARBY)
        fastest.fuller()
        self._close(fastest)

    def _fastest(self) -> OnMesh:
        return min(self.searched, key=lambda on_mesh: on_mesh.step_ps)

    def _close(self, on_mesh: OnMesh) -> None:
        """Prove that a mesh has nothing that is estimated to be better, or find it."""
        for _ in range(CLOSED):
            if not on_mesh.close(self._best_ps(), self.enough, self._held()):
                break
            self._play(on_mesh, LAYOUTS)
            self.enough = min(self.enough, on_mesh.enough)

    def _bound(self, search: MeshSearch, held: float) -> float:
        """What no estimate is below on a mesh that was not searched, under what plans hold that fit
        on others.
        """
        bound, near = search.bound_under(held), self._best_ps() * (1 - TOLERANCE)
        if not bound < near < inf:
            return bound
        return max(bound, search.under(held).prove(self._fastest().search.worth, near))

    def bound(self, meshes: Iterable[Mesh]) -> None:
        """What no plan on meshes that were not searched undercuts."""
        self.least += (least_compute_ps(self._problem(mesh)) for mesh in meshes)

    def _problem(
        self, mesh: Mesh, menus: Sequence[Menu] = (), program: Program | None = None
    ) -> LayoutProblem:
        return LayoutProblem(
            program or self.program,
            Walker({}, mesh, self.question.cluster, self.question.kernels),
            self.base,
            self.question.optimizer,
            menus=menus,
            shared=self.shared,
            work=self.work,
        )

    def _play(self, on_mesh: OnMesh, count: int) -> None:
        """Simulate the `count` best layouts of a mesh, where they promise to be among the best."""
        if self.trust.promises(on_mesh.promise_ps):
            on_mesh.play(count)

    def fitting(self) -> Iterator[Fit]:
        """What was simulated and fits, on all meshes."""
        return chain.from_iterable(on_mesh.fitting() for on_mesh in self.searched)

    def _held(self) -> float:
        """The most that is counted of a plan that fits."""
        return max((on_mesh.held() for on_mesh in self.searched), default=0.0)

    def _best_ps(self) -> float:
        """The best estimate of a plan that fits."""
        return min((fit.candidate.sums.step_ps for fit in self.fitting()), default=inf)

    def any_fits(self) -> bool:
        """Whether something was found that fits."""
        return self.trust.best_ps < inf

    def _tell(self, on_mesh: OnMesh) -> None:
        sizes = _sizes(on_mesh.problem.mesh)
        if not on_mesh.found.candidates:
            self.say(f"mesh {sizes}: nothing fits")
            return
        estimate = f"estimated {_seconds(on_mesh.promise_ps)}"
        least = f"no estimate below {_seconds(on_mesh.found.bound_ps)}"
        best, bound = self.trust.best_ps, min(self.least)
        so_far = f"best so far {_seconds(best)}" if best < inf else "nothing that fits so far"
        gap = f", gap {best / bound - 1:.1%}" if best < inf and bound else ""
        self.say(f"mesh {sizes}: {estimate}, {least}; {so_far}, bound {_seconds(bound)}{gap}")


def _rank(on_mesh: OnMesh) -> tuple[float, float]:
    return on_mesh.step_ps, on_mesh.promise_ps


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)


def _seconds(ps: float) -> str:
    return format_seconds(ps / 1e12)


def _cuts(mesh: Mesh) -> tuple[tuple[PrimeAxis, ...], ...]:
    """What a mesh is, whatever its axes are called."""
    return tuple(axis.primes for axis in mesh.axes)
