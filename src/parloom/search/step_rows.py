"""The step formula, on the rows of a layout model: the one place that says what a step costs.

    step = n (forward + backward + sent + alone) + n max(0, gathered - forward)
           + (n - 1) max(0, again + chunked - backward)
           + max(0, again + chunked + reduced - backward) + after

for n microbatches: weights gathered for a block hide behind the forward pass, those gathered again
and gradients in chunks behind each backward pass, gradients reduced once behind the last. Memory
has two instants: in the passes what is kept, stored, and there of weights that move; during the
update what is stored and what the optimizer needs beside its states.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

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
    UPDATING,
    WEIGHT_PARTS,
)

NUM_ROWS = PARTS + WEIGHT_PARTS
COMPUTE_AND_SENT = [FORWARD, FORWARD_SENT, BACKWARD, BACKWARD_SENT]


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """Dual values: of hiding gathers behind the forward pass, of hiding behind each backward pass
    but the last and behind the last (each 0 to 1), and of a byte of memory in the passes and during
    the update (ps).
    """

    forward: float = 0.5
    between: float = 0.5
    last: float = 0.5
    pass_byte_ps: float = 0.0
    update_byte_ps: float = 0.0

    @property
    def byte_ps(self) -> float:
        """A byte at both instants."""
        return self.pass_byte_ps + self.update_byte_ps

    def with_byte(self, byte_ps: float) -> "ShadowPrices":
        """The same where a byte costs so much, shared between the instants as it is here."""
        share = self.pass_byte_ps / self.byte_ps if self.byte_ps else 1.0
        return replace(self, pass_byte_ps=share * byte_ps, update_byte_ps=(1.0 - share) * byte_ps)


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
    found[[KEPT, PARTS + MOVING]] = duals.pass_byte_ps
    found[PARTS + STORED] = duals.byte_ps
    found[PARTS + UPDATING] = duals.update_byte_ps
    return found


EXPOSED = ("forward_ps", "between_ps", "last_ps")
INSTANTS = ("pass_bytes", "update_bytes")


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of rows that the formula is made of; `plain_ps` counts as it is."""

    plain_ps: float
    forward_ps: float
    between_ps: float
    last_ps: float
    pass_bytes: float
    update_bytes: float = 0.0

    @property
    def held_bytes(self) -> float:
        """At the instant at which more is held."""
        return max(self.pass_bytes, self.update_bytes)

    @property
    def step_ps(self) -> float:
        """The estimate of the step."""
        exposed = (self.forward_ps, self.between_ps, self.last_ps)
        return self.plain_ps + sum(max(0.0, ps) for ps in exposed)


def step_sums(rows: Floats, num_microbatches: int) -> StepSums:
    """The sums of a solution with these totals."""
    return StepSums(*(_terms(num_microbatches) @ rows).tolist())


def all_step_sums(rows: Floats, num_microbatches: int) -> list[StepSums]:
    """The sums of several solutions, [solution, row]."""
    return [StepSums(*sums) for sums in (rows @ _terms(num_microbatches).T).tolist()]


@lru_cache
def _terms(num_microbatches: int) -> Floats:
    """How often each row counts in each of the sums: [sum, row]."""
    n, found = num_microbatches, np.zeros((6, NUM_ROWS))
    plain, forward, between, last, passes, update = found
    plain[COMPUTE_AND_SENT] = plain[PARTS + ALONE] = n
    plain[PARTS + AFTER] = 1
    forward[PARTS + GATHERED], forward[FORWARD] = n, -n
    last[[PARTS + AGAIN, PARTS + CHUNKED, BACKWARD]] = 1, 1, -1
    between[:] = (n - 1) * last
    last[PARTS + REDUCED] = 1
    passes[[KEPT, PARTS + STORED, PARTS + MOVING]] = 1
    update[[PARTS + STORED, PARTS + UPDATING]] = 1
    return found
