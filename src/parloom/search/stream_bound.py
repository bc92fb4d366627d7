"""A lower bound on every step of a context, however well it overlaps.

Streams are the compute stream and the links of the innermost and of the outermost level. The
compute stream computes, and waits for each collective on activations as it is launched. For any
shares of streams that add up to one, no step is shorter than the shares of what its streams are
busy; the least of that over all plans is a minimum of the model, and a linear program over the
plans found so far says which shares bound best.
"""

from collections.abc import Iterable
from math import inf

import numpy as np

from parloom.linear_program import LinearProgram
from parloom.search.contexts import ContextSearch
from parloom.search.model import Floats
from parloom.search.prices import LINKS, PARTS
from parloom.search.step_rows import COMPUTE_AND_SENT, NUM_ROWS
from parloom.search.storage import MEASURES

MS = 1e9
ROUNDS, TOLERANCE, SOLVED = 12, 0.01, 1e-3


def stream_prices(shares: Floats, num_microbatches: int) -> Floats:
    """The price of each row where the streams have these shares."""
    found = np.zeros(NUM_ROWS)
    found[COMPUTE_AND_SENT] = num_microbatches * shares[0]
    found[LINKS] = num_microbatches * shares[1:]
    found[PARTS:][MEASURES] = shares
    return found


def busy(rows: Floats, num_microbatches: int) -> Floats:
    """How long each stream is busy in a step with these totals, in ps."""
    each = np.array([rows[COMPUTE_AND_SENT].sum(), *rows[LINKS]])
    return num_microbatches * each + rows[PARTS:][MEASURES]


def least_step_ps(context: ContextSearch, enough: float = inf) -> float:
    """The bound of a context in ps; more than `enough` is not looked for."""
    bound, shares = 0.0, np.array([1.0, 0.0, 0.0])
    known: list[Floats] = []
    count = context.num_microbatches
    for _ in range(ROUNDS):
        prices = stream_prices(shares, count)
        least, values = context.columns.minimum(prices, SOLVED)
        bound = max(bound, least)
        if bound >= enough or not values:
            break
        known.append(busy(context.layouts.evaluate(values, prices), count))
        cost, shares = _best_shares(known)
        if bound >= cost * (1 - TOLERANCE):
            break
    return bound


class StepBounds:
    """Bounds of contexts; one that is known is not looked for again."""

    def __init__(self) -> None:
        # With what was enough of each when it was found.
        self._known: dict[int, tuple[ContextSearch, float, float]] = {}

    def least_ps(self, context: ContextSearch, enough: float = inf) -> float:
        """The bound of a context, or some bound of at least `enough`."""
        _, bound, before = self._known.get(id(context), (context, inf, inf))
        if id(context) not in self._known or before <= bound < enough:
            bound = least_step_ps(context, enough)
            self._known[id(context)] = context, bound, enough
        return bound

    def least_of(self, contexts: Iterable[ContextSearch]) -> float:
        """The least bound of several contexts."""
        least = inf
        for context in contexts:
            least = min(least, self.least_ps(context, least))
        return least

    def below(self, step_ps: float, contexts: Iterable[ContextSearch]) -> list[ContextSearch]:
        """The contexts in which a plan may take less: one takes as little, or no bound says that
        none does.
        """
        return [one for one in contexts if self._may_be_below(step_ps, one)]

    def any_below(self, step_ps: float, contexts: Iterable[ContextSearch]) -> bool:
        """Whether there is such a context."""
        return any(self._may_be_below(step_ps, one) for one in contexts)

    def _may_be_below(self, step_ps: float, one: ContextSearch) -> bool:
        least = min((found.step_ps for found in one.fitting()), default=inf)
        return least <= step_ps or self.least_ps(one, step_ps) < step_ps


def _best_shares(known: list[Floats]) -> tuple[float, Floats]:
    """How busy the busiest stream of the best mixture is, and the shares that prove it."""
    program = LinearProgram()
    most = program.column(1.0)
    parts = [program.column(0.0) for _ in known]
    program.row(dict.fromkeys(parts, 1.0), 1.0, 1.0)
    for stream in range(len(known[0])):
        terms = {part: -float(k[stream]) / MS for part, k in zip(parts, known, strict=True)}
        program.row({most: 1.0, **terms}, low=0.0)
    answer = program.solve()
    assert answer is not None, "some mixture is always possible"
    shares = np.clip(answer.prices[1:], 0.0, 1.0)
    return answer.cost * MS, shares / shares.sum()
