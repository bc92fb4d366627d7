"""Recomputation as the search chooses it: of equal calls, those that must, or all that may.

What recomputing costs is linear in how many of equal calls do it, so that under given multipliers
one of these two is best; what is between them, an integer program chooses (`polish`).
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


@dataclass(frozen=True, slots=True)
class Policy:
    """Calls of `block`: `least` recompute in any case, and `free` others if that pays. `chosen`:
    all of them alike, by a variable.
    """

    block: Block
    least: int
    free: int
    chosen: bool

    @property
    def size(self) -> int:
        """How many values the variable has."""
        return 2 if self.chosen and self.free else 1

    def recomputing(self, value: int) -> int:
        """How many calls recompute where the variable has this value."""
        return self.least + value * self.free


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
    least, most = limits(program, block)
    return Policy(block, least, most - least, chosen)


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
