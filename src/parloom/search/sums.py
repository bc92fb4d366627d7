"""What the parts of a plan add up to, as the search counts it (see `estimate`)."""

from dataclasses import dataclass

from parloom.search.layouts import Totals
from parloom.search.prices import BACKWARD, FORWARD, KEPT
from parloom.search.storage import AFTER, AGAIN, ALONE, CHUNKED, GATHERED, MOVING, REDUCED, STORED


@dataclass(frozen=True, slots=True)
class Sums:
    """What the parts of a plan add up to: sums in ps that the objective is made of, and bytes.

    `plain` counts as it is; of `gathered` and `reduced` only what is above zero: what weights send
    beyond what hides it, in the forward and in the backward pass.
    """

    plain: int
    gathered: int
    reduced: int
    held_bytes: int

    @property
    def step_ps(self) -> int:
        return self.plain + max(0, self.gathered) + max(0, self.reduced)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a linear program says a unit of each sum is worth; `held` is ps for a byte."""

    gathered: float = 0.5
    reduced: float = 0.5
    held: float = 0.0


def summed(passes: Totals, weights: Totals) -> Sums:
    """The sums of a plan of one microbatch (see `estimate`)."""
    return Sums(
        int(passes[:KEPT].sum() + weights[ALONE] + weights[AFTER]),
        int(weights[GATHERED] - passes[FORWARD]),
        int(weights[AGAIN] + weights[CHUNKED] + weights[REDUCED] - passes[BACKWARD]),
        int(passes[KEPT] + weights[STORED] + weights[MOVING]),
    )
