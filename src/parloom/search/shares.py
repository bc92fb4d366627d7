"""Who pays for a movement that several readers of a value may share.

A value is brought to a state once for all readers that want it so. Tables between two variables
count a share of the price for each reader, all shares together one at most, so that no sum is above
the truth. The best shares are those under which the least sum is the largest: while costs are
passed between tables (`domains`), what one reader can do without goes to the others. That is the
dual ascent of facility location (Erlenkotter, Operations Research 26, 1978).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from parloom.search.eliminate import Indices, Table


@dataclass(frozen=True)
class Payer:
    """A reader: the variables of source and reader, the state that each value of the reader wants
    (an index into `states`), the prices of getting there, and which share of them it pays: [value
    of the source, state].
    """

    source: int
    variable: int
    index: Indices
    states: Sequence[Hashable]
    prices: Table
    share: Table


class Pool:
    """Readers of one value, and the shares that they pay, `whole` together at most."""

    def __init__(self, payers: Sequence[Payer], whole: float = 1.0) -> None:
        self.payers, self.whole, self.turn = payers, whole, 0
        number: dict[Hashable, int] = {}
        self.states = [
            np.array([number.setdefault(s, len(number)) for s in payer.states], dtype=np.intp)
            for payer in payers
        ]
        self.prices = np.zeros((len(payers), len(payers[0].share), len(number)))
        self.share, self.wanted = np.zeros_like(self.prices), np.zeros_like(self.prices)
        for i, (payer, states) in enumerate(zip(payers, self.states, strict=True)):
            self.prices[i][:, states] = payer.prices
            self.share[i][:, states] = payer.share
            self.wanted[i][:, states] = 1.0
        self.wanted /= self.wanted.sum(axis=0)

    @property
    def source(self) -> int:
        """The variable that makes the value."""
        return self.payers[0].source

    def shares(self) -> list[Table]:
        """What each reader pays, for the states that it came with."""
        return [share[:, states] for share, states in zip(self.share, self.states, strict=True)]

    def balance(self, table_of: Callable[[int], Table]) -> None:
        """Share anew, in the tables [source, reader] that `table_of` finds for a reader's variable.

        A reader needs no more of a price than lifts the state to its least cost. Of what is left,
        one reader after the other takes what lifts its least cost.
        """
        base = np.stack([self._least(i, table_of) for i in range(len(self.payers))])
        least = base.min(axis=2, keepdims=True)
        base -= self.share * self.prices
        share = np.clip(self._lifting(least - base, self.prices), 0.0, self.share)
        left = np.maximum(0.0, self.whole - share.sum(axis=0))
        for turn in range(len(share)):
            i = (turn + self.turn) % len(share)
            lifted = (base[i] + (share[i] + left) * self.prices[i]).min(axis=1, keepdims=True)
            more = self._lifting(lifted - base[i], self.prices[i]) - share[i]
            more = np.clip(more, 0.0, left)
            share[i] += more
            left -= more
        self.turn += 1
        share += left * self.wanted
        added = (share - self.share) * self.prices
        for payer, states, more in zip(self.payers, self.states, added, strict=True):
            table_of(payer.variable)[...] += more[:, states[payer.index]]
        self.share = share

    def _least(self, i: int, table_of: Callable[[int], Table]) -> Table:
        """What each state costs a reader at least; infinite where it does not want it."""
        column = self.states[i][self.payers[i].index]
        order = np.argsort(column, kind="stable")
        states, starts = np.unique(column[order], return_index=True)
        found = np.full(self.share.shape[1:], inf)
        table = table_of(self.payers[i].variable)[:, order]
        found[:, states] = np.minimum.reduceat(table, starts, axis=1)
        return found

    @staticmethod
    def _lifting(costs: Table, prices: Table) -> Table:
        """Which shares of prices are these costs."""
        return np.divide(costs, prices, out=np.zeros_like(prices), where=prices > 0)
