"""Recomputation as the search chooses it: how many of equal calls.

What recomputing costs is linear in how many of equal calls do it, so that under given multipliers
the fewest or the most are best. Under several at once (`closing`) what is between them may be.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parloom.search.pins import KEEP, RECOMPUTE
from parloom.search.prices import BACKWARD, BACKWARD_SENT, FORWARD, FORWARD_SENT, KEPT, PARTS
from parloom.search.program import Block, Flags, Program

# Of the groups of calls of one block kind, the largest are variables of the search: tables double
# with each. Others recompute in the bound what pays, operator by operator.
MOST = 3


# So many counts of calls each have a value of their own in `Policy.around`.
APART = 5
Counts = tuple[tuple[int, int], ...]
"""For each value of a variable the fewest and the most calls that recompute. Where these differ,
tables count for each operator and way what is best.
"""


@dataclass(frozen=True, slots=True)
class Policy:
    """Calls of `block`, of which `least` to `most` recompute. `chosen`: by a variable."""

    block: Block
    least: int
    most: int
    chosen: bool

    @property
    def extremes(self) -> Counts:
        """As few as must, and as many as may."""
        if self.chosen and self.least < self.most:
            return (self.least, self.least), (self.most, self.most)
        return ((self.least, self.most),)

    def around(self, count: int) -> Counts:
        """All counts, those near `count` apart."""
        if not self.chosen:
            return self.extremes
        low = max(self.least, min(count - APART // 2, self.most - APART + 1))
        high = min(self.most, low + APART - 1)
        apart = tuple((some, some) for some in range(low, high + 1))
        below = ((self.least, low - 1),) if self.least < low else ()
        above = ((high + 1, self.most),) if high < self.most else ()
        return (*below, *apart, *above)


def policies_of(program: Program) -> tuple[Policy, ...]:
    """What the calls of each of `program.blocks` may do."""
    ranked = sorted(program.blocks, key=lambda block: -len(block.prefixes))
    seen: Counter[str] = Counter()
    chosen = set()
    for block in ranked:
        if seen[block.function] < MOST:
            chosen.add(block)
        seen[block.function] += 1
    return tuple(_policy(program, block, block in chosen) for block in program.blocks)


def running(policies: Iterable[Policy]) -> Mapping[int, Sequence[tuple[int, Flags]]]:
    """For each operator the policies (by index) of the calls that run it, with the operands through
    which gradients flow.
    """
    found: defaultdict[int, list[tuple[int, Flags]]] = defaultdict(list)
    for position, policy in enumerate(policies):
        for operator, flags in policy.block.operators:
            found[operator].append((position, flags))
    return found


def receiving(policies: Iterable[Policy]) -> Mapping[int, Sequence[int]]:
    """For each flow the policies (by index) of the calls that it flows into."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for position, policy in enumerate(policies):
        for flow in policy.block.flows:
            found[flow].append(position)
    return found


def _policy(program: Program, block: Block, chosen: bool) -> Policy:
    return Policy(block, *limits(program, block), chosen)


def limits(program: Program, block: Block) -> tuple[int, int]:
    """How many calls recompute at least, and at most."""
    policies = tuple(_asked(program, block))
    return policies.count(RECOMPUTE), len(policies) - policies.count(KEEP)


def recomputing(program: Program, block: Block, count: int) -> tuple[str, ...]:
    """The `count` calls that recompute: those that must, then the last of those that may."""
    policies = tuple(zip(block.prefixes, _asked(program, block), strict=True))
    forced = [prefix for prefix, policy in policies if policy == RECOMPUTE]
    others = [prefix for prefix, policy in policies if policy is None]
    return (*forced, *others[len(others) - (count - len(forced)) :])


def _asked(program: Program, block: Block) -> Iterator[str | None]:
    """What each call of a block must do, by a pin or because the user's model checkpoints it."""
    asked = set(program.graph.recomputed_calls)
    for prefix in block.prefixes:
        own = RECOMPUTE if prefix in asked else None
        yield program.pinned.policies.get(prefix, own)


def recomputed(parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The parts of a call whose forward pass is run again in its backward pass."""
    found = parts.copy()
    found[BACKWARD] += parts[FORWARD]
    found[BACKWARD_SENT] += parts[FORWARD_SENT]
    found[KEPT] = 0
    return found


def again(passes: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the parts of a call count once more if it recomputes, where they count `passes`."""
    found = np.zeros(PARTS)
    found[FORWARD], found[FORWARD_SENT] = passes[BACKWARD], passes[BACKWARD_SENT]
    found[KEPT] = -passes[KEPT]
    return found
