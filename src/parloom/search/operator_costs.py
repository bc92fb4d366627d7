"""What one call of an operator costs: computing, messages and memory by its choice and its fate."""

from collections.abc import Sequence

import numpy as np

from parloom.ir.ops import op_of
from parloom.search.fates import KEEP, REGATHER, REMAKE, Fates, Options
from parloom.search.model import Floats
from parloom.search.prices import (
    BACKWARD,
    BACKWARD_SENT,
    FORWARD,
    FORWARD_SENT,
    KEPT,
    PARTS,
    Prices,
)
from parloom.search.program import Flags, Program


class OperatorCosts:
    """The rows of single calls of the operators of a program on one mesh."""

    def __init__(
        self, program: Program, prices: Prices, options: Sequence[Options], fates: Fates
    ) -> None:
        self.program, self.prices, self.options, self.fates = program, prices, options, fates
        self._known: dict[tuple[int, Flags], Floats] = {}

    def rows(self, index: int, flags: Flags) -> Floats:
        """Rows of one call of an operator: [choice, fate, row]."""
        if (index, flags) not in self._known:
            self._known[index, flags] = self._rows(index, flags)
        return self._known[index, flags]

    def _rows(self, index: int, flags: Flags) -> Floats:
        operator, options = self.program.operators[index], self.options[index]
        choices = options.menu.choices
        listed = [self.prices.operator(index, choice, flags) for choice in choices]
        prices = np.array(listed, dtype=float).reshape(-1, PARTS)
        own, read = self.fates.results(index)
        kept = np.zeros(len(choices))
        for r, value in enumerate(operator.node.results if any(flags) else ()):
            sizes = np.array([self.prices.held_bytes(value.spec, c.results[r]) for c in choices])
            prices[:, KEPT] -= sizes * (r in own)
            # Where nothing keeps any of them, all are kept for readers that are remade.
            kept += sizes * (r in own or r in read or not (own or read))
        prices[:, KEPT] = np.maximum(prices[:, KEPT], 0)
        made = [self.fates.gradient_bytes(index, choice, self.prices) for choice in choices]
        rows = np.repeat(prices[:, None, :], len(options.fates), axis=1)
        for i, fate in enumerate(options.fates):
            if fate in (KEEP, REGATHER):
                rows[:, i, KEPT] += kept
            if fate == REMAKE:  # what it saves inside is dropped, too
                rows[:, i, KEPT] = 0.0
                # A call without gradients has no backward pass; in one where the operator alone has
                # none, this is too little.
                if any(flags):
                    rows[:, i, BACKWARD] += prices[:, FORWARD]
                    rows[:, i, BACKWARD_SENT] += prices[:, FORWARD_SENT]
        rows[:, :, KEPT] += np.array(made, dtype=float)[:, None]
        if op_of(operator.node).writes:  # the memory is there whatever the pass does
            spec = operator.operands[0]
            there = [self.prices.held_bytes(spec, choice.operands[0]) for choice in choices]
            rows[:, :, KEPT] += np.array(there, dtype=float)[:, None]
        return rows
