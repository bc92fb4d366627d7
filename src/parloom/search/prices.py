"""What choices cost, by the cost layer itself: one operator or one chain of movements is lowered
and walked as a whole plan would be.

A price counts whole picoseconds and bytes, so that sums do not depend on their order. Scalars are
not counted: what one operator does with a partial scalar depends on all that read it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from parloom.cost.liveness import Lives
from parloom.cost.tasks import SHARES, Links, picoseconds
from parloom.cost.walk import Walker
from parloom.cost.works import Called, Exchange, Work
from parloom.errors import LayoutError
from parloom.ir.adjacent import operands_at
from parloom.ir.graph import DTYPE_BYTES, TensorSpec, with_operands
from parloom.ir.layout import local_shape
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.moves import plan_moves
from parloom.ir.ops import op_of
from parloom.ir.ops.shape import EITHER
from parloom.ir.pcg import Compute, Item, Movement, PValue, operands_of, results_of
from parloom.search.choices import Choice, Menu, Menus
from parloom.search.program import Flags, Operator, Program, State
from parloom.search.single import Lowered, Single, is_local_program, sees_place

# Parts of a price: forward and backward pass, computing and exchanging (ps), and bytes that are
# kept for the backward pass; and how long (ps, both passes) that keeps the links of the innermost
# and of the outermost level of the cluster busy.
FORWARD, FORWARD_SENT, BACKWARD, BACKWARD_SENT, KEPT, NEAR, FAR = range(7)
PARTS = 7
LINKS = slice(NEAR, FAR + 1)
Price = NDArray[np.int64]


@dataclass(frozen=True)
class KnownThere:
    """Menus and prices that hold on one mesh of one cluster, for any program."""

    menus: dict[object, Menu] = field(default_factory=dict)
    prices: dict[object, Price] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """What is known of menus and prices on devices of one type, for any program: prices of
    operators by local sizes hold on every mesh, others on one.
    """

    operators: dict[object, Price] = field(default_factory=dict)
    on: defaultdict[tuple[Cluster, Mesh], KnownThere] = field(
        default_factory=lambda: defaultdict(KnownThere)
    )


class Prices:
    """Prices on one mesh of one cluster; what was asked before is known."""

    def __init__(self, program: Program, walker: Walker, shared: Known | None = None) -> None:
        self.program, self.walker, self.mesh = program, walker, walker.mesh
        self.single = Single(program.graph, program.factored, self.mesh)
        self.shared = shared or Known()
        there = self.shared.on[walker.cluster, walker.mesh]
        self.known, self.menus = there.prices, Menus(program, self.single, there.menus)
        self.links = Links(walker.cluster)

    def operator(self, index: int, choice: Choice, flags: Flags) -> Price:
        """One call of an operator, operands as the choice wants them, gradients as `flags` say."""
        operator = self.program.operators[index]
        if operator.is_scalar or operator.node.op == EITHER or choice.absent:
            return _nothing()
        known: dict[object, Price] = self.known
        signature: tuple[object, ...] = choice.assignment
        assignment = dict(choice.assignment)
        if not is_local_program(operator, assignment) and not sees_place(operator, assignment):
            known, signature = self.shared.operators, self._signature(operator, choice)
        key = self.program.kinds[index], flags, signature
        if key not in known:
            known[key] = self.alone(operator, choice, flags)
        return known[key]

    def _signature(self, operator: Operator, choice: Choice) -> tuple[object, ...]:
        """What the price depends on where every rank runs the operator on its shards."""
        specs = (*operator.operands, *(v.spec for v in operator.node.results))
        states = (*choice.operands, *choice.results)
        shapes = tuple(
            local_shape(state.layout, spec.shape, self.mesh)
            for state, spec in zip(states, specs, strict=True)
        )
        return shapes, self.mesh.size(operator.rule.split_axes(dict(choice.assignment)))

    def alone(self, operator: Operator, choice: Choice, flags: Flags) -> Price:
        """The same of an operator that need not be one of the program."""
        found = self._lowered(operator, choice, flags)
        names = frozenset(value.name for value in found.operands)
        return self._walked(found.operands, found.items, found.results, names)

    def _lowered(self, operator: Operator, choice: Choice, flags: Flags) -> Lowered:
        if is_local_program(operator, dict(choice.assignment)):
            return self.single.lower(operator, dict(choice.assignment), choice.operands, flags)
        return _alone(operator, choice, flags)

    def first_bytes(self, index: int, choice: Choice, flags: Flags) -> int:
        """What the backward pass of an operator takes before it frees anything."""
        found = self._lowered(self.program.operators[index], choice, flags)
        names = frozenset(value.name for value in found.operands)
        lives = Lives(names, frozenset())
        self.walker.walk(found.operands, tuple(found.items), lives, found.results)
        works = tuple(_counted(lives, lives.backward))
        return max((work.takes + work.staging for work in works[:1]), default=0)

    def movement(self, spec: TensorSpec, flows: bool, source: State, target: State) -> Price | None:
        """The movements from `source` to `target`; None where there are none that lead there."""
        if source.layout == target.layout and (not flows or source.varying == target.varying):
            return _nothing()
        key = spec, flows, source.layout, source.varying, target.layout, target.varying
        if key not in self.known:
            self.known[key] = self._movement(spec, flows, source, target)
        found = self.known[key]
        return None if found[FORWARD] < 0 else found

    def _movement(self, spec: TensorSpec, flows: bool, source: State, target: State) -> Price:
        try:
            steps = plan_moves(
                source.layout,
                target.layout,
                spec.shape,
                self.mesh,
                source_varying=source.varying,
                target_varying=target.varying,
                differentiable=flows,
            )
        except LayoutError:
            return np.full(PARTS, -1, dtype=np.int64)
        first = value = PValue("value0", spec, source.layout, source.varying, flows)
        items = []
        varying = frozenset(source.varying)
        for index, step in enumerate(steps):
            varying = step.varying(varying)
            made = PValue(f"value{index + 1}", spec, step.result, tuple(sorted(varying)), flows)
            items.append(Movement(step, value, made))
            value = made
        return self._walked((first,), items, (value,), frozenset([first.name]))

    def primitive(
        self, name: str, axes: tuple[str, ...], before: int, after: int, *, backward: bool
    ) -> Price:
        """One primitive over `axes` that makes `after` local bytes of `before`."""
        compute_s, exchange = self.walker.primitive(name, axes, before, after)
        price = _nothing()
        at = BACKWARD if backward else FORWARD
        price[at] = picoseconds(compute_s)
        if exchange is not None:
            price[at + 1] = picoseconds(exchange.seconds)
            price[LINKS] = busy_ps(exchange, self.links)
        return price

    def _walked(
        self,
        inputs: tuple[PValue, ...],
        items: Iterable[Item],
        outputs: tuple[PValue, ...],
        outside: frozenset[str],
    ) -> Price:
        lives = Lives(outside, frozenset())
        walked = self.walker.walk(inputs, tuple(items), lives, outputs)
        busy = np.zeros(2, dtype=np.int64)
        for work in (*_counted(lives, lives.forward), *_counted(lives, lives.backward)):
            if work.exchange is not None:
                busy += busy_ps(work.exchange, self.links)
        return np.array([*passes_ps(lives), walked.inside_bytes, *busy], dtype=np.int64)

    def held_bytes(self, spec: TensorSpec, state: State) -> int:
        """Bytes of one rank's shard."""
        if state.absent:
            return 0
        size = DTYPE_BYTES[spec.dtype]
        for n in local_shape(state.layout, spec.shape, self.mesh):
            size *= n
        return size


def _alone(operator: Operator, choice: Choice, flags: Flags) -> Lowered:
    """One call of an operator that every rank runs on its shards, in the states of `choice`."""
    names = tuple(f"operand{i}" for i in range(len(flags)))
    node, op = with_operands(operator.node, names), op_of(operator.node)
    operands = tuple(
        PValue(name, spec, state.layout, state.varying if flows else (), flows)
        for name, spec, state, flows in zip(
            names, operator.operands, choice.operands, flags, strict=True
        )
    )
    flows = op.differentiable and any(flags)
    results = tuple(
        PValue(
            value.name, value.spec, state.layout, (),
            flows and value.spec.is_float and index not in op.detached,
        )
        for index, (value, state) in enumerate(zip(node.results, choice.results, strict=True))
    )  # fmt: skip
    alike = (p for p in operator.adjacent if len({flags[i] for i in operands_at(node, p)}) == 1)
    item = Compute(node, operator.rule, choice.assignment, operands, results, tuple(alike))
    return Lowered(operands, (item,), results)


def passes_ps(lives: Lives) -> tuple[int, int, int, int]:
    """Forward and backward pass of a body that was walked, computing and exchanging.

    Calls and scalars are not counted.
    """
    found = []
    for works, again in ((lives.forward, ()), (lives.backward, lives.again)):
        counted = [*_counted(lives, works), *(w for w in again if isinstance(w, Work))]
        found.append(sum(picoseconds(work.compute_s) for work in counted))
        exchanges = (work.exchange.seconds for work in counted if work.exchange is not None)
        found.append(sum(map(picoseconds, exchanges)))
    return found[0], found[1], found[2], found[3]


def _counted(lives: Lives, works: Iterable[Work | Called | None]) -> Iterator[Work]:
    for item, work in zip(lives.items, works, strict=True):
        if isinstance(work, Work) and not is_scalar(item):
            yield work


def busy_ps(exchange: Exchange, links: Links) -> tuple[int, int]:
    """How long an exchange keeps the innermost level busy, and the outermost if it is another."""
    busy = dict.fromkeys(range(len(links.cluster.levels)), 0)
    for flow in links.exchange("", exchange).flows:
        busy[flow.links[0]] += flow.size // SHARES
    return busy[0], busy[len(busy) - 1] if len(busy) > 1 else 0


def is_scalar(item: Item) -> bool:
    """Whether an item reads and makes nothing but scalars."""
    return not any(v.spec.shape for v in (*operands_of(item), *results_of(item)))


def _nothing() -> Price:
    return np.zeros(PARTS, dtype=np.int64)
