"""Parts of a model of several forms in which some takes are made: where its minimum begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from parloom.errors import InputError
from parloom.ir.ops.shape import EITHER
from parloom.rewrite.forms import Forms
from parloom.search.fates import AGAIN, Options
from parloom.search.model import Bools
from parloom.search.program import Program


@dataclass(frozen=True, eq=False)
class FormParts:
    """Models of some takes: the options with which operators are there that these need, once."""

    program: Program
    forms: Forms
    options: Sequence[Options]

    @property
    def number(self) -> int:
        """How many takes there are."""
        return len(self.forms.takes)

    def of_form(self, values: Sequence[int]) -> Sequence[Bools]:
        """The options with which the same operators are there as in a solution."""
        found = []
        for options, value in zip(self.options, values, strict=False):
            own = options.menu.choices[options.option(value)[0]]
            alike = [
                choice.taken == own.taken and choice.absent == own.absent
                for choice in options.menu.choices
            ]
            found.append(np.array(alike)[options.choice])
        return found

    def allowed(self, part: frozenset[int]) -> Sequence[Bools] | None:
        """See `Parts`; None where these do not go together."""
        takes = [self.forms.takes[number] for number in sorted(part)]
        try:
            there = set(self.forms.of(takes).places.values())
        except InputError:
            return None
        taken = dict(chain.from_iterable(self.forms.positions[take] for take in takes))
        found = []
        for operator, options in zip(self.program.operators, self.options, strict=True):
            at, is_there = taken.get(operator.place, 0), operator.place in there
            allowed = np.array(
                [
                    choice.taken in (-1, at)
                    if operator.node.op == EITHER
                    else choice.absent != is_there
                    for choice in options.menu.choices
                ]
            )
            once = options.by_fate([fate not in AGAIN for fate in options.fates])
            found.append(allowed[options.choice] & (once > 0))
        return found
