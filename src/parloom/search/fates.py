"""What happens to the results of each operator between the passes.

Autograd keeps what an operator saves. A value that is kept may lie in the layout in which it was
made, or as a redistribution of it; and what a block makes may be made again in its backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parloom.ir.ops import Site, op_of
from parloom.search.choices import Choice, Menu
from parloom.search.model import Indices
from parloom.search.prices import Prices
from parloom.search.program import Flow, Program, Reader

# The results of an operator are kept for the backward pass, remade in it, or neither; kept but for
# their redistributions, which are remade; or they lie in the memory of the operand.
KEEP, REMAKE, DROP, REGATHER, ALIAS = "keep", "remake", "drop", "regather", "alias"
# As readers see it: not there; there; there, and redistributions are remade.
SEEN = {DROP: 0, KEEP: 1, ALIAS: 1, REGATHER: 2, REMAKE: 2}
# Fates that need the operands in the backward pass.
NEEDING = (REMAKE, ALIAS)
AGAIN = (REMAKE, REGATHER)


@dataclass(frozen=True)
class Options:
    """The options of an operator: each choice of its menu with each of `fates`."""

    menu: Menu
    fates: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.menu) * len(self.fates)

    @cached_property
    def choice(self) -> Indices:
        """The choice of each option."""
        return np.repeat(np.arange(len(self.menu)), len(self.fates))

    def by_fate(self, each: Sequence[int]) -> Indices:
        """For each option the number that `each` has for its fate."""
        return np.tile(np.array(each, dtype=np.intp), len(self.menu))

    def option(self, value: int) -> tuple[int, str]:
        """The choice and the fate of an option."""
        choice, fate = divmod(value, len(self.fates))
        return choice, self.fates[fate]


class Fates:
    """What autograd keeps of a program, and the fates that results may have; those of blocks may be
    remade.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = {block.function for block in program.blocks}
        self.reads: dict[tuple[int, int], list[tuple[Flow, Reader]]] = {}
        for flow in program.flows:
            if flow.operator >= 0:
                self.reads.setdefault((flow.operator, flow.result), []).extend(
                    (flow, reader) for reader in flow.readers
                )
        self.known: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self.operands: dict[int, frozenset[int]] = {}

    def is_block(self, index: int) -> bool:
        return self.program.operators[index].function in self.blocks

    def enters(self, flow: Flow, reader: Reader) -> bool:
        """Whether a value comes into a block call from outside of it."""
        if not self.is_block(reader.operator) or flow.weight >= 0:
            return False
        return flow.operator < 0 or flow.crosses

    def saves(self, flow: Flow, reader: Reader) -> bool:
        """Whether autograd keeps what a reader of a flow gets."""
        if flow.weight >= 0:
            return False
        if reader.operator not in self.operands:
            operator = self.program.operators[reader.operator]
            wanted = [any(flags) for flags in zip(*(f for f, _ in operator.flows), strict=True)]
            site = Site(operator.node, operator.operands)
            found = set()
            op = op_of(operator.node)
            if op.differentiable and any(wanted):
                for what, index in op.saves(site):
                    other = any((*wanted[:index], *wanted[index + 1 :]))
                    if what == "operand" or (what == "other" and other):
                        found.add(index)
            self.operands[reader.operator] = frozenset(found)
        return reader.operand in self.operands[reader.operator]

    def results(self, index: int) -> tuple[frozenset[int], frozenset[int]]:
        """The results that the operator itself keeps, and those that readers keep."""
        if index not in self.known:
            operator = self.program.operators[index]
            op = op_of(operator.node)
            site = Site(operator.node, operator.operands)
            flows = op.differentiable and any(any(flags) for flags, _ in operator.flows)
            own = {i for what, i in op.saves(site) if what == "result"} if flows else set()
            read = {
                r
                for r in range(len(operator.node.results))
                if any(self.needs(f, reader) for f, reader in self.reads.get((index, r), ()))
            }
            self.known[index] = frozenset(own), frozenset(read)
        return self.known[index]

    def needs(self, flow: Flow, reader: Reader) -> bool:
        """Whether a reader saves the value, itself or through views of it."""
        if self.saves(flow, reader):
            return True
        operator = self.program.operators[reader.operator]
        if not op_of(operator.node).view:
            return False
        return any(
            self.needs(f, r)
            for result in range(len(operator.node.results))
            for f, r in self.reads.get((reader.operator, result), ())
        )

    @cached_property
    def first_backward(self) -> int | None:
        """The operator that a backward pass begins with; None in a call of a block."""
        for index in reversed(self.program.index.values()):
            operator = self.program.operators[index]
            flows = op_of(operator.node).differentiable and any(any(f) for f, _ in operator.flows)
            if flows and not operator.is_scalar:
                return index if operator.function == self.program.graph.main.name else None
        return None

    def gradient_bytes(self, index: int, choice: Choice, prices: Prices) -> int:
        """What an operator takes for gradients while all that is kept is still there."""
        if index != self.first_backward or choice.absent:
            return 0
        ((flags, _),) = self.program.operators[index].flows
        return prices.first_bytes(index, choice, flags)

    def of(self, index: int) -> tuple[str, ...]:
        """The fates that an operator may have."""
        operator = self.program.operators[index]
        own, _ = self.results(index)
        if operator.is_scalar:
            return (DROP,)
        if op_of(operator.node).view:
            return (ALIAS, DROP)
        kept = (KEEP,) if own else (DROP, KEEP)
        if not self.is_block(index):
            return kept
        leaves = any(
            flow.crosses or flow.whole
            for result in range(len(operator.node.results))
            for flow, _ in self.reads.get((index, result), ())
        )
        return (*kept, REGATHER) if leaves else (*kept, REGATHER, REMAKE)


class AskedFates(Fates):
    """One fate for each operator: results are kept, or remade in block kinds all of whose calls the
    user's model checkpoints.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        asked = program.graph.recomputed_calls
        others = {b.function for b in program.blocks if not {*b.prefixes} <= {*asked}}
        self.checkpointed = self.blocks - others

    def of(self, index: int) -> tuple[str, ...]:
        """The fate of an operator."""
        possible = super().of(index)
        again = self.program.operators[index].function in self.checkpointed
        preferred = (REMAKE, KEEP, ALIAS, DROP) if again else (KEEP, ALIAS, DROP)
        return (next(fate for fate in preferred if fate in possible),)
