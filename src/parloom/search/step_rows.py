"""The step formula, on the rows of a layout model: the one place that says what a step costs.

    step = n (forward + backward + sent + alone) + n max(0, gathered - forward)
           + (n - 1) max(0, again + chunked - backward)
           + max(0, again + chunked + reduced - backward) + after

for n microbatches: weights gathered for a block hide behind the forward pass, those gathered again
and gradients in chunks behind each backward pass, gradients reduced once behind the last. Memory is
what is kept, stored, and there of weights that move.
"""

from dataclasses import dataclass

import numpy as np

from parloom.search.model import Floats
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT, PARTS
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    MOVING,
    REDUCED,
    STORED,
    WEIGHT_PARTS,
)

NUM_ROWS = PARTS + WEIGHT_PARTS
COMPUTE_AND_SENT = [FORWARD, FORWARD_SENT, BACKWARD, BACKWARD_SENT]


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """Dual values: of hiding gathers behind the forward pass, of hiding behind each backward pass
    but the last and behind the last (each 0 to 1), and of a byte of memory (ps).
    """

    forward: float = 0.5
    between: float = 0.5
    last: float = 0.5
    byte_ps: float = 0.0


def row_prices(duals: ShadowPrices, num_microbatches: int) -> Floats:
    """The Lagrangian's price of each row."""
    n, found = float(num_microbatches), np.zeros(NUM_ROWS)
    hidden = (n - 1) * duals.between + duals.last
    found[FORWARD] = n * (1 - duals.forward)
    found[[FORWARD_SENT, BACKWARD_SENT]] = n
    found[BACKWARD] = n - hidden
    found[PARTS + GATHERED] = n * duals.forward
    found[[PARTS + AGAIN, PARTS + CHUNKED]] = hidden
    found[PARTS + REDUCED] = duals.last
    found[PARTS + ALONE] = n
    found[PARTS + AFTER] = 1.0
    found[[KEPT, PARTS + STORED, PARTS + MOVING]] = duals.byte_ps
    return found


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of rows that the formula is made of; `plain_ps` counts as it is."""

    plain_ps: float
    forward_ps: float
    between_ps: float
    last_ps: float
    held_bytes: float

    @property
    def step_ps(self) -> float:
        """The estimate of the step."""
        exposed = (self.forward_ps, self.between_ps, self.last_ps)
        return self.plain_ps + sum(max(0.0, ps) for ps in exposed)


def step_sums(rows: Floats, num_microbatches: int) -> StepSums:
    """The sums of a solution with these totals."""
    n = num_microbatches
    weights = rows[PARTS:]
    again = weights[AGAIN] + weights[CHUNKED] - rows[BACKWARD]
    return StepSums(
        float(n * (rows[COMPUTE_AND_SENT].sum() + weights[ALONE]) + weights[AFTER]),
        float(n * (weights[GATHERED] - rows[FORWARD])),
        float((n - 1) * again),
        float(again + weights[REDUCED]),
        float(rows[KEPT] + weights[STORED] + weights[MOVING]),
    )
