"""Markov chains over plans, as FlexFlow's search walks them (Jia, Zaharia, Aiken; SysML 2019,
section 6: Metropolis and Hastings).
"""

from collections.abc import Callable
from math import exp
from random import Random
from typing import Protocol, TypeVar

# Of the best plan's cost (the released code's 0.05 is of a millisecond): what is slower by 0.3 % is
# accepted once in e times.
BETA = 300.0
# The released code goes back to the best plan after a hundredth of the budget, at most so often.
RESETS, RESET = 100, 1000
State = TypeVar("State")


class Walk(Protocol[State]):
    """Where a chain is."""

    def cost(self) -> float:
        """Of the plan that it is at."""
        ...

    def propose(self) -> tuple[float, Callable[[], None]] | None:
        """The cost of a random change, and how to take it; None where it is none."""
        ...

    def state(self) -> State:
        """The plan, to go back to."""
        ...

    def go_back(self, state: State) -> None:
        """Be at a plan again."""
        ...


def acceptance(current: float, proposed: float, scale: float) -> float:
    """The probability with which a proposal is accepted, for costs of about `scale`."""
    return exp(min(0.0, BETA * (current - proposed) / scale))


def chain(walk: Walk[State], budget: int, rng: Random) -> tuple[float, State]:
    """The best cost and plan that a chain of `budget` proposals meets, where it then is; it ends
    where half of them bring nothing better.
    """
    current = walk.cost()
    best, plan, last = current, walk.state(), 0
    reset = min(RESET, max(1, budget // RESETS))
    for count in range(1, budget + 1):
        if count - last > max(1, budget // 2):
            break
        if count % reset == 0 and current > best:
            walk.go_back(plan)
            current = best
        change = walk.propose()
        if change is None:
            continue
        proposed, take = change
        if rng.random() >= acceptance(current, proposed, best):
            continue
        take()
        current = proposed
        if current < best:
            best, plan, last = current, walk.state(), count
    walk.go_back(plan)
    return best, plan
