"""The answer of a search: plans that were simulated, and what none undercuts."""

from dataclasses import dataclass, replace
from math import inf

from parloom.ir.expected import Status
from parloom.search.contexts import SimulatedPlan
from parloom.search.rewritten import RewrittenRequest

# Bounds are sums of floating-point numbers.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Searched:
    """The plans that were simulated, the fastest that fit first; what no plan of the space
    undercuts, and what no estimate undercuts; how the search ended; what was left out, in words;
    the smallest of all plans that were simulated; and how much of the budget is left.
    """

    proposals: tuple[SimulatedPlan, ...]
    bound_ps: float
    estimate_bound_ps: float
    status: Status = Status.COMPLETE
    left_out: str = ""
    smallest: SimulatedPlan | None = None
    work_left: int | None = None

    @property
    def solver_gap(self) -> float | None:
        """(Best estimate - its bound) / its bound; None where no plan has an estimate, where the
        search did not end, or where an estimate is below its bound.
        """
        gap = self._gap
        if self.status is not Status.COMPLETE or gap is None or gap < -ROUNDING:
            return None
        return max(gap, 0.0)

    @property
    def bound_words(self) -> str:
        """Empty, or by how much an estimate is below its bound."""
        gap = self._gap
        if self.status is not Status.COMPLETE or gap is None or gap >= -ROUNDING:
            return ""
        return f"an estimate is {-gap:.2%} below its bound, which is wrong then: no gap is given"

    @property
    def _gap(self) -> float | None:
        best = min((found.estimate_ps for found in self.proposals), default=inf)
        if best == inf or self.estimate_bound_ps <= 0:
            return None
        return best / self.estimate_bound_ps - 1

    def of(self, asked: RewrittenRequest) -> "Searched":
        """This answer about a rewritten graph as one about the graph that was asked about."""
        return replace(
            self,
            proposals=tuple(map(asked.as_asked, self.proposals)),
            smallest=self.smallest and asked.as_asked(self.smallest),
        )

    def beside(self, other: "Searched") -> "Searched":
        """This answer with that of another space, which it asked for: bounds are of both."""
        small = [plan for plan in (self.smallest, other.smallest) if plan is not None]
        return replace(
            self,
            proposals=tuple(sorted((*self.proposals, *other.proposals), key=rank)),
            bound_ps=min(self.bound_ps, other.bound_ps),
            estimate_bound_ps=min(self.estimate_bound_ps, other.estimate_bound_ps),
            status=other.status if other.status is Status.INTERRUPTED else self.status,
            left_out="; ".join(dict.fromkeys(filter(None, (self.left_out, other.left_out)))),
            smallest=min(small, key=lambda plan: (plan.peak_bytes, plan.step_ps), default=None),
        )


def rank(found: SimulatedPlan) -> tuple[float, int]:
    """Faster plans come first, and of equally fast ones those on fewer devices."""
    return found.step_ps, found.decisions.num_ranks
