"""The search on one mesh: what the program proposes, lowered and played.

What a proposal's step needs beyond what the search counts shows as it is simulated; everything is
then chosen again under another limit on what is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from parloom.ir.lower import lower
from parloom.ir.plan import Decisions, Prediction
from parloom.search.closing import TOLERANCE, close
from parloom.search.layouts import LayoutProblem
from parloom.search.least import smallest
from parloom.search.master import Found, MeshSearch
from parloom.search.polish import Candidate, decisions, least_bytes, polish, uniform
from parloom.search.question import Question, Wanted
from parloom.search.sums import Worth
from parloom.search.trust import Trust

TRIES = 5
# Layouts that are simulated, the best first, until one fits.
UNTIL = 8
# How near bound and cost of mixtures come together, where a price is wanted and otherwise.
ROUGH, FINE = 1e-2, 1e-3
# The share of the memory within which the largest limit is sought that fits; how far from what fits
# to what does not the next one is at most; the share of what is left that it is to fill.
CLOSE, WITHIN, FILLED = 0.02, 0.9, 0.9
# How many of the estimates that are near the best are simulated.
PLAYED_NEARBY = 8
# Weight, gradient and optimizer state in chunks, of all weights alike: ZeRO 3, 2, 1 and 0.
ALIKE = ((True, True, True), (False, True, True), (False, False, True), (False, False, False))


@dataclass(frozen=True)
class Proposal:
    """A plan with its simulated step and its estimate."""

    decisions: Decisions
    prediction: Prediction
    estimate_ps: int


@dataclass(frozen=True, eq=False)
class Fit:
    """A candidate as a plan, its simulated step, and how much of its peak is above the limit."""

    candidate: Candidate
    decisions: Decisions
    prediction: Prediction
    excess_bytes: int

    @property
    def step_ps(self) -> float:
        return self.prediction.step_s * 1e12

    @property
    def obeys(self) -> bool:
        """Whether the peak is within the limit."""
        return self.excess_bytes <= 0

    @property
    def held_bytes(self) -> int:
        """What the search counts of it."""
        return self.candidate.sums.held_bytes

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.decisions, self.prediction, self.candidate.sums.step_ps)


class OnMesh:
    """The search on one mesh."""

    def __init__(
        self,
        problem: LayoutProblem,
        question: Question,
        base: Decisions,
        trust: Trust,
        worth: Worth | None = None,
    ) -> None:
        self.problem, self.question, self.base, self.trust = problem, question, base, trust
        self.limit_bytes = question.limit_bytes
        self.played: dict[Candidate, Fit] = {}
        # What may be counted, and what was found to leave enough room for the rest.
        self.limit, self.enough = float(self.limit_bytes), inf
        # The largest limit under which the best layout fits, and the smallest under which not.
        self.fits, self.fails = 0.0, inf
        self.right = 0.0  # the largest under which the best layout was ever found to fit
        self.asked = 0.0, 0.0  # what the bound was brought near to, under which limit
        self.search = MeshSearch(problem, self.limit, worth=worth)
        self.found = Found((), inf)
        self.searches: list[MeshSearch] = []

    def smallest(self) -> Fit | None:
        """The plan that holds least, if there is any. Where it fits although more is counted, as
        much may be.
        """
        candidate = smallest(self.problem)
        if candidate is None:
            return None
        fit = self._play(candidate)
        if fit.obeys:
            self.limit = max(self.limit, candidate.sums.held_bytes - fit.excess_bytes)
        return fit

    def begin(self, enough: float) -> None:
        """Search, with what other meshes showed of how much may be counted."""
        self.enough = enough
        self._anew(min(self.limit, enough))

    def close(self, best_ps: float, enough: float, held: float) -> bool:
        """Bring the bound near `best_ps`, under what may be counted as the plans that fit showed:
        those of all meshes hold `held` at most. Whether that was needed.
        """
        limit = self._due(enough, held)
        near = best_ps * (1 - TOLERANCE)
        if self._bound_under(limit) >= near or self.asked == (best_ps, limit):
            return False
        self.asked = best_ps, limit
        if limit != self.limit or not self.searches:
            self._anew(limit)
        if self.found.bound_ps < near:
            self.found = close(self.search, best_ps)
        return True

    def _anew(self, limit: float) -> None:
        """Search under a limit that other plans showed to be right."""
        self.fits, self.fails = 0.0, inf
        self._search(limit)

    def _search(self, limit: float) -> None:
        """Search under a limit on what the search counts."""
        self.limit, self.search = limit, self.search.under(limit)
        self.searches.append(self.search)
        self.found = self.search.run(ROUGH if self.question.wanted is Wanted.PRICE else FINE)

    def held(self) -> float:
        """The most that is counted of a plan that fits."""
        return max((fit.held_bytes for fit in self.fitting()), default=0.0)

    def bound_ps(self, enough: float, held: float) -> float:
        """What no estimate is below, under the limit that `close` brings it near under."""
        return self._bound_under(self._due(enough, held))

    def _due(self, enough: float, held: float) -> float:
        """The limit for bounds: what may be counted as was found on this mesh, or else on others;
        all plans that were found to fit obey it, on any mesh where none was on this one.
        """
        limit = self.right or min(self.limit, self.enough, enough)
        return max(limit, self.held() or held)

    def _bound_under(self, limit: float) -> float:
        return max((search.bound_under(limit) for search in self.searches), default=0.0)

    @property
    def step_ps(self) -> float:
        """The fastest step of those played that fit."""
        return min((fit.step_ps for fit in self.fitting()), default=inf)

    @property
    def promise_ps(self) -> float:
        """The best estimate."""
        return min((c.sums.step_ps for c in self.found.candidates), default=inf)

    @property
    def reached_ps(self) -> float:
        """The best estimate of what fits; where nothing does yet, the best estimate."""
        found = (fit.candidate.sums.step_ps for fit in self.fitting())
        return min(found, default=self.promise_ps)

    def play(self, count: int) -> None:
        """Simulate the `count` best layouts, and go on until one fits.

        What a step needs beyond what the search counts (buffers, what lives for a moment), or less
        than that (what is shared), shows only then: the search is told of another limit.
        """
        best: tuple[float, MeshSearch, Found] | None = None
        for tries in range(TRIES):
            tried = self._tried(count)
            limit = self._corrected(tried) if tried else None
            if tried and self.limit == self.fits:
                best = self.limit, self.search, self.found
            if limit is None or tries == TRIES - 1:
                break
            self._search(limit)
        if best is not None:
            self.limit, self.search, self.found = best

    def _tried(self, count: int) -> list[Fit]:
        """The `count` best layouts simulated, or more until one fits."""
        tried: list[Fit] = []
        for index, candidate in enumerate(self.found.candidates[: max(count, UNTIL)]):
            done = index >= count and any(fit.obeys for fit in tried)
            if done or not self.trust.promises(candidate.sums.step_ps):
                break
            tried += self._fits(candidate.values, count > 1)
        return tried

    def _corrected(self, tried: Sequence[Fit]) -> float | None:
        """The limit under which to search next, as the peaks of `tried` ask for; None where this
        one is right: between what fits and what does not, nearer than it matters.
        """
        best = min(tried, key=lambda fit: (max(fit.excess_bytes, 0), fit.step_ps))
        if not tried[0].obeys:
            self.fails = min(self.fails, self.limit)
        else:
            self.fits = max(self.fits, self.limit)
            self.right = max(self.right, self.limit)
            if not self.search.worth.held:
                return None
        # What may be counted if others need as much beyond it.
        limit = min(self.limit, best.held_bytes) - best.excess_bytes
        if not self.fits < limit < self.fails:
            filled = min(best.held_bytes, self.fails) if best.obeys else 0.0
            limit = (max(self.fits, filled) + self.fails) / 2
        near = CLOSE * self.limit_bytes
        if limit == inf or abs(limit - self.limit) < near or self.fails - self.fits < near:
            return None
        return limit

    def nearby(self, share: float) -> None:
        """Simulate plans whose estimates are nearly as good as the best: which is the fastest, only
        simulation says.
        """
        near = self.search.nearby(self.found, share)[:PLAYED_NEARBY]
        for candidate in near:
            if self.trust.promises(candidate.sums.step_ps):
                self._play(candidate)
        if near:
            self._alike(near[0])

    def fuller(self) -> None:
        """Simulate the layouts of the fastest plan with as much kept as fits: the limit on what is
        counted may have been learnt from plans that need more beyond it.
        """
        fit = min(self.fitting(), key=lambda fit: fit.step_ps)
        spare = -fit.excess_bytes
        for _ in range(TRIES):
            if spare < CLOSE * self.limit_bytes:
                return
            held = fit.held_bytes
            candidate = polish(self.problem, fit.candidate.values, held + spare)
            if candidate is None or not self.trust.promises(candidate.sums.step_ps):
                return
            tried = self._play(candidate)
            if not tried.obeys or tried is fit:
                spare //= 2
                continue
            fit, spare = tried, -tried.excess_bytes

    def _fits(self, values: Sequence[int], frugal: bool) -> list[Fit]:
        """Layouts with storage and recomputation such that the peak of the step fits, or nearly.

        What a step needs beyond what the search counts depends on what is stored how: the limit is
        sought that leaves just enough for it. Where `frugal`, storage is chosen once more with
        that, frugally.
        """
        fits: list[Fit] = []
        limit = good = self.limit
        least, near = least_bytes(self.problem, values), CLOSE * self.limit_bytes
        under: Fit | None = None
        over: Fit | None = None
        for _ in range(TRIES):
            candidate = polish(self.problem, values, limit)
            if candidate is None:
                break
            fit = self._play(candidate)
            known = fit in fits
            fits.append(fit)
            last = under if fit.obeys else None
            if fit.obeys:
                under, good = fit, limit
            elif over is None or fit.held_bytes < over.held_bytes:
                over = fit
            if known or -near < fit.excess_bytes <= 0 or (over and over.held_bytes <= least):
                break
            if not under or not over:
                limit = max(fit.held_bytes - fit.excess_bytes, least + 1.0)
            elif over.held_bytes - under.held_bytes < near:
                break
            else:
                limit = _crossing(under, over, last)
        else:
            over = None  # not settled
        if under and over:
            self.enough = good
        if fits and not fits[0].obeys:  # weights that are stored alike need fewer buffers
            fits += self._alike(fits[0].candidate)
        thrifty = polish(self.problem, values, good, frugal=True) if frugal else None
        if thrifty and self.trust.promises(thrifty.sums.step_ps):
            fits.append(self._play(thrifty))
        return fits

    def _alike(self, candidate: Candidate) -> list[Fit]:
        """A candidate with all weights stored alike, simulated where that may be among the best."""
        alike = [uniform(self.problem, candidate, stored) for stored in ALIKE]
        return [
            self._play(c)
            for c in alike
            if self.trust.promises(c.sums.step_ps) and c.sums.held_bytes <= self.limit_bytes
        ]

    def fitting(self) -> Iterator[Fit]:
        """What was simulated and fits."""
        return (fit for fit in self.played.values() if fit.obeys)

    def _play(self, candidate: Candidate) -> Fit:
        if candidate not in self.played:
            self.problem.work.spend()
            self.played[candidate] = self._simulated(candidate)
            fit = self.played[candidate]
            self.trust.saw(candidate.sums.step_ps, fit.step_ps, fits=fit.obeys)
        return self.played[candidate]

    def _simulated(self, candidate: Candidate) -> Fit:
        plan = decisions(self.problem, candidate, self.base)
        pcg = lower(self.problem.program.graph, plan, factored=self.problem.program.factored)
        expected = self.question.predict(pcg, plan)
        return Fit(candidate, plan, expected, expected.peak_bytes - self.limit_bytes)


def _crossing(under: Fit, over: Fit, last: Fit | None) -> float:
    """What may be counted so that a plan between two fills the memory nearly: its peak is taken to
    grow with that as it did between `under` and the one that fitted before it, or `over`.
    """
    other = over if last is None or last.held_bytes == under.held_bytes else last
    growth = (other.excess_bytes - under.excess_bytes) / (other.held_bytes - under.held_bytes)
    between = over.held_bytes - under.held_bytes
    more = -FILLED * under.excess_bytes / growth if growth > 0 else between
    return under.held_bytes + min(WITHIN * between, max((1 - WITHIN) * between, more))
