"""The objective of a layout search: what a lowered plan is expected to cost, from its parts.

    step = microbatches x (forward + backward) + what weights send beyond what hides it
           + update + what is gathered after it

Weights gathered for a block hide behind what its pass computes, gradients that are reduced behind
what the backward pass computes, but for the first gather and the last reduction; main's own weights
are gathered before it begins. The estimate is in whole picoseconds and in sums that a search can
fold: scalars are not counted, and a weight sends its share of a message (`storage`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parloom.cost.liveness import Lives
from parloom.cost.walk import Walker
from parloom.ir.pcg import PCG, TIME, PCall, PFunction
from parloom.ir.plan import Optimizer
from parloom.ir.step_program import block_weights
from parloom.search.folding import last_reduced, reached
from parloom.search.prices import (
    BACKWARD,
    BACKWARD_SENT,
    FORWARD,
    FORWARD_SENT,
    PARTS,
    passes_ps,
)
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    REDUCED,
    WEIGHT_PARTS,
    StoragePrices,
    StoredWeight,
    level_of,
)

Totals = NDArray[np.int64]
SENT = (FORWARD_SENT, BACKWARD_SENT)


@dataclass(frozen=True)
class Estimate:
    """Totals of a step: `passes` per microbatch by `prices`' parts, `weights` by `storage`'s."""

    passes: Totals
    weights: Totals
    num_microbatches: int = 1

    @property
    def exposed_ps(self) -> tuple[int, int, int]:
        """What weights send beyond what hides it: in every forward pass, in every backward pass but
        the last, in the last.
        """
        again = self.weights[AGAIN] + self.weights[CHUNKED]
        computed = self.passes[BACKWARD]
        return (
            max(0, int(self.weights[GATHERED] - self.passes[FORWARD])),
            max(0, int(again - computed)),
            max(0, int(again + self.weights[REDUCED] - computed)),
        )

    @property
    def step_ps(self) -> int:
        """The whole step."""
        count = self.num_microbatches
        each = sum(int(self.passes[part]) for part in (FORWARD, BACKWARD, *SENT))
        gathered, between, last = self.exposed_ps
        step = count * (each + gathered + int(self.weights[ALONE]))
        step += (count - 1) * between + last
        return step + int(self.weights[AFTER])


def estimate(pcg: PCG, walker: Walker, optimizer: Optimizer) -> Estimate:
    """The estimate of a lowered program, item by item and call by call."""
    calls = [item for item in pcg.main.body if isinstance(item, PCall)]
    passes = np.zeros(PARTS, dtype=np.int64)
    passes[:4] = _passes(pcg.main, walker)
    known = {f.name: np.array(_passes(f, walker), dtype=np.int64) for f in pcg.functions}
    for call in calls:
        found = known[call.function]
        passes[:4] += found
        if call.policy == "recompute":
            passes[BACKWARD] += found[FORWARD]
            passes[BACKWARD_SENT] += found[FORWARD_SENT]
    return Estimate(passes, _weights(pcg, walker, calls, optimizer), pcg.num_microbatches)


def _passes(function: PFunction, walker: Walker) -> tuple[int, int, int, int]:
    lives = Lives(frozenset(v.name for v in function.inputs), frozenset())
    body = tuple(item for item in function.body if not isinstance(item, PCall))
    walker.walk(function.inputs, body, lives, (), function.remake)
    return passes_ps(lives)


def _weights(pcg: PCG, walker: Walker, calls: Sequence[PCall], optimizer: Optimizer) -> Totals:
    prices = StoragePrices(walker, pcg.decisions, optimizer)
    own = block_weights(pcg)
    unit = {
        value.name: call.prefix
        for call in calls
        for value, alone in zip(call.args, own[call.function], strict=True)
        if alone
    }
    elements: Counter[str | None] = Counter()
    for parameter in pcg.parameters:
        value = parameter.input.value
        elements[unit.get(value.name)] += value.spec.num_elements
    trained = sum(p.input.value.spec.num_elements for p in pcg.parameters if p.input.trainable)
    last, trained_at_all = last_reduced(pcg.graph), reached(pcg.graph)
    total = np.zeros(WEIGHT_PARTS, dtype=np.int64)
    for parameter in pcg.parameters:
        name, spec = parameter.input.value.name, parameter.input.value.spec
        reduce = tuple(a for a in parameter.reduce if a != TIME)
        stored = StoredWeight(
            spec,
            parameter.input.trainable,
            name in unit,
            parameter.layout,
            reduce,
            elements[unit.get(name)],
            trained,
            max(1, len(elements) - (None in elements)),
            name in last,
            reached=name in trained_at_all,
        )
        total += prices.price(stored, level_of(parameter.decision))
    return total
