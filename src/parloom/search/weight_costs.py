"""Where weights lie in a solution, and what storing them costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parloom.ir.layout import Layout
from parloom.search.fates import Options
from parloom.search.homes import Home
from parloom.search.model import Term, View
from parloom.search.prices import PARTS
from parloom.search.program import Axes, Program, Reader, State, Weight
from parloom.search.storage import WEIGHT_PARTS, Level, StoragePrices, stored_of

STORAGE = slice(PARTS, PARTS + WEIGHT_PARTS)


@dataclass(frozen=True, eq=False)
class WeightCosts:
    """Weights of one layout model: the `homes` of those that several operators read, and the
    `variable` that chooses one, by their index.
    """

    program: Program
    options: Sequence[Options]
    homes: Mapping[int, tuple[Home, ...]]
    variable: Mapping[int, int]
    storage: StoragePrices

    def terms(self) -> Iterator[Term]:
        """A term for the storage of each weight, for each reader of one whose readers are never
        there together: the levels are alternatives.
        """
        for index, weight in enumerate(self.program.weights):
            if index in self.homes:
                places = [(home.layout, home.reduce) for home in self.homes[index]]
                view = View(self.variable[index], np.arange(len(places)), len(places))
                yield self._stored(weight, places, view)
            for reader in weight.readers if index not in self.homes else ():
                options = self.options[reader.operator]
                wanted = options.menu.operands[reader.operand]
                states = [
                    None if weight.apart and own.absent else (own.layout, own.varying)
                    for own in wanted.values
                ]
                view = View(reader.operator, wanted.index[options.choice], len(states))
                yield self._stored(weight, states, view)
            if not weight.readers:
                yield self._stored(weight, [(Layout(), ())])

    def _stored(
        self, weight: Weight, places: Sequence[tuple[Layout, Axes] | None], *views: View
    ) -> Term:
        """What it costs to store a weight in these places; nothing in none."""
        nothing = (Level(),), np.zeros((1, WEIGHT_PARTS), dtype=np.int64)
        listed = [
            nothing if own is None else self.storage.options(stored_of(self.program, weight, *own))
            for own in places
        ]
        most = max((len(levels) for levels, _ in listed), default=0)
        costs = np.zeros((max(1, most), len(places), WEIGHT_PARTS))
        legal = np.zeros(costs.shape[:-1], dtype=bool)
        for i, (levels, parts) in enumerate(listed):
            costs[: len(levels), i] = parts * weight.count
            legal[: len(levels), i] = True
        if not views:
            costs, legal = costs[:, 0], legal[:, 0]
        return Term(views, ((costs, legal),), STORAGE, "weight")

    def placed_by(self, weight: int, values: Sequence[int]) -> int | None:
        """The variable that says where a weight lies; None of one that nothing reads."""
        if weight in self.homes:
            return self.variable[weight]
        reader = self._reader(weight, values)
        return None if reader is None else reader.operator

    def _reader(self, weight: int, values: Sequence[int]) -> Reader | None:
        """The reader that is there, or the first one."""
        readers = self.program.weights[weight].readers
        there = (own for own in readers if not self._state(own, values).absent)
        return next(there, readers[0] if readers else None)

    def _state(self, reader: Reader, values: Sequence[int]) -> State:
        """How a reader wants what it reads."""
        options = self.options[reader.operator]
        choice, _ = options.option(values[reader.operator])
        return options.menu.choices[choice].operands[reader.operand]

    def home(self, weight: int, values: Sequence[int]) -> tuple[Layout, Axes]:
        """Compute layout of a weight, and the axes over which its gradient is partial."""
        if weight in self.homes:
            home = self.homes[weight][values[self.variable[weight]]]
            return home.layout, home.reduce
        reader = self._reader(weight, values)
        if reader is None:
            return Layout(), ()
        state = self._state(reader, values)
        return state.layout, state.varying
