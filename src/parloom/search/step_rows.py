"""The step formula, on the rows of a layout model: the one place that says what a step costs.

    step = n (forward + backward + sent + alone) + n max(0, gathered - forward)
           + (n - 1) max(0, again + chunked - backward)
           + max(0, again + chunked + reduced - backward) + after

for n microbatches: weights gathered for a block hide behind the forward pass, those gathered again
and gradients in chunks behind each backward pass, gradients reduced once behind the last. Memory
has three instants, each with what is stored: between the passes what is kept, as main's gathered
weights have their gradients these, both with what earlier microbatches left of gradients; during
the update all gradients and what the optimizer needs beside its states. Compositions know a fourth
one: as the last of the calls that recompute runs backward.

A pipeline keeps the activations of several microbatches, and where its stages have few blocks,
weights that are gathered and gradients in chunks hide behind nothing.
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
    COLLECTED,
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
class Passes:
    """The passes of a step: of so many microbatches, of which `in_flight` are kept at once; whether
    weights and gradients on the move hide behind them.
    """

    num_microbatches: int
    in_flight: float = 1.0
    hides: bool = True


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """Dual values: of hiding gathers behind the forward pass, of hiding behind each backward pass
    but the last and behind the last (each 0 to 1), and of a byte of memory between the passes, as
    main's gradients are whole, and during the update (ps).
    """

    forward: float = 0.5
    between: float = 0.5
    last: float = 0.5
    pass_byte_ps: float = 0.0
    whole_byte_ps: float = 0.0
    update_byte_ps: float = 0.0

    @property
    def byte_ps(self) -> float:
        """A byte at all instants."""
        return self.pass_byte_ps + self.whole_byte_ps + self.update_byte_ps

    def with_byte(self, byte_ps: float) -> "ShadowPrices":
        """The same where a byte costs so much, shared between the instants as it is here."""
        before = (self.whole_byte_ps, self.update_byte_ps)
        whole, update = (byte_ps * ps / self.byte_ps if ps else 0.0 for ps in before)
        passes = byte_ps - whole - update if self.pass_byte_ps or not self.byte_ps else 0.0
        return replace(
            self, pass_byte_ps=max(0.0, passes), whole_byte_ps=whole, update_byte_ps=update
        )


def row_prices(duals: ShadowPrices, passes: Passes) -> Floats:
    """The Lagrangian's price of each row."""
    if not passes.hides:
        duals = replace(duals, forward=0.0, between=0.0, last=0.0)
    n, found = float(passes.num_microbatches), np.zeros(NUM_ROWS)
    hidden = (n - 1) * duals.between + duals.last
    found[FORWARD] = n * (1 - duals.forward)
    found[[FORWARD_SENT, BACKWARD_SENT]] = n
    found[BACKWARD] = n - hidden
    found[PARTS + GATHERED] = n * duals.forward
    found[[PARTS + AGAIN, PARTS + CHUNKED]] = hidden
    found[PARTS + REDUCED] = duals.last
    found[PARTS + ALONE] = n
    found[PARTS + AFTER] = 1.0
    if not passes.hides:
        found[[PARTS + GATHERED, PARTS + AGAIN, PARTS + CHUNKED]] = n
        found[PARTS + REDUCED] = 1.0
    found[KEPT] = passes.in_flight * duals.pass_byte_ps
    found[PARTS + MOVING] = duals.whole_byte_ps
    found[PARTS + STORED] = duals.byte_ps
    if passes.num_microbatches > 1:
        found[PARTS + COLLECTED] = duals.pass_byte_ps + duals.whole_byte_ps
    found[PARTS + UPDATING] = duals.update_byte_ps
    return found


EXPOSED = ("forward_ps", "between_ps", "last_ps")
INSTANTS = ("pass_bytes", "whole_bytes", "update_bytes")


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of rows that the formula is made of; `plain_ps` counts as it is. `remade_bytes`, which
    compositions alone know: as the last of the calls that recompute runs backward.
    """

    plain_ps: float
    forward_ps: float
    between_ps: float
    last_ps: float
    pass_bytes: float
    whole_bytes: float = 0.0
    update_bytes: float = 0.0
    remade_bytes: float = 0.0

    @property
    def held_bytes(self) -> float:
        """At the instant at which most is held."""
        return max(self.pass_bytes, self.whole_bytes, self.update_bytes, self.remade_bytes)

    @property
    def step_ps(self) -> float:
        """The estimate of the step."""
        exposed = (self.forward_ps, self.between_ps, self.last_ps)
        return self.plain_ps + sum(max(0.0, ps) for ps in exposed)


def step_sums(rows: Floats, passes: Passes) -> StepSums:
    """The sums of a solution with these totals."""
    return StepSums(*(_terms(passes) @ rows).tolist())


def all_step_sums(rows: Floats, passes: Passes) -> list[StepSums]:
    """The sums of several solutions, [solution, row]."""
    return [StepSums(*sums) for sums in (rows @ _terms(passes).T).tolist()]


@lru_cache
def _terms(passes: Passes) -> Floats:
    """How often each row counts in each of the sums: [sum, row]."""
    n, found = passes.num_microbatches, np.zeros((7, NUM_ROWS))
    plain, forward, between, last, kept, whole, update = found
    plain[COMPUTE_AND_SENT] = plain[PARTS + ALONE] = n
    plain[PARTS + AFTER] = 1
    forward[PARTS + GATHERED], forward[FORWARD] = n, -n
    last[[PARTS + AGAIN, PARTS + CHUNKED, BACKWARD]] = 1, 1, -1
    between[:] = (n - 1) * last
    last[PARTS + REDUCED] = 1
    if not passes.hides:
        plain[[PARTS + GATHERED, PARTS + AGAIN, PARTS + CHUNKED]] = n
        plain[PARTS + REDUCED] = 1
        forward[:] = between[:] = last[:] = 0
    kept[KEPT] = passes.in_flight
    kept[PARTS + STORED] = 1
    whole[[PARTS + STORED, PARTS + MOVING]] = 1
    kept[PARTS + COLLECTED] = whole[PARTS + COLLECTED] = n > 1
    update[[PARTS + STORED, PARTS + UPDATING]] = 1
    return found
