"""The model of one context: layouts of operators, storage of weights, activations kept or remade.

Variables are operators (sharding x what happens to results in the backward pass) and weights that
several operators read. Calls of one block kind share them, so terms are counted.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from parloom.cost.walk import Walker
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Menu, assignments
from parloom.search.fates import Fates, Options
from parloom.search.flow_costs import PASSES, FlowCosts
from parloom.search.form_parts import FormParts
from parloom.search.homes import agreements, homes
from parloom.search.model import Floats, Model, Row, Term, Variable, View
from parloom.search.operator_costs import OperatorCosts
from parloom.search.prices import PARTS, Known, Prices
from parloom.search.program import Axes, Block, Program
from parloom.search.storage import WEIGHT_PARTS, StoragePrices
from parloom.search.weight_costs import WeightCosts

# Costs are sums of floating-point numbers.
ROUNDING = 1e-9
STORAGE = slice(PARTS, PARTS + WEIGHT_PARTS)
BYTES = ("kept", "stored", "collected", "moving", "updating")
ROWS = tuple(
    Row(name, "bytes" if name in BYTES else "ps")
    for name in (
        "forward", "forward sent", "backward", "backward sent", "kept", "near", "far",
        "gathered", "again", "chunked", "reduced", "alone", "after", "stored", "collected",
        "moving", "updating", "updated", "weights near", "weights far",
    )
)  # fmt: skip


class LayoutModel:
    """The model of `program` on the mesh of `walker`; `given` menus take the place of all choices,
    `storage` and `fates` of all levels and fates; `shared` is what is known of menus and prices.
    """

    def __init__(
        self,
        program: Program,
        walker: Walker,
        decisions: Decisions,
        optimizer: Optimizer,
        shared: Known | None = None,
        given: Sequence[Menu] = (),
        storage: StoragePrices | None = None,
        fates: Fates | None = None,
    ) -> None:
        self.program, self.mesh = program, walker.mesh
        self.prices = Prices(program, walker, shared)
        self.storage = storage or StoragePrices(walker, decisions, optimizer)
        self.fates = fates or Fates(program)
        menus = tuple(given) or self.prices.menus.all(self._allowed)
        self.options = [Options(menu, self.fates.of(i)) for i, menu in enumerate(menus)]
        self.homes = {
            index: tuple(homes(weight, menus, self.mesh))
            for index, weight in enumerate(program.weights)
            if weight.is_shared
        }
        self.variable = {w: len(menus) + i for i, w in enumerate(self.homes)}
        self.flows = FlowCosts(
            program, self.prices, self.options, self.fates, self.homes, self.variable
        )
        self.weights = WeightCosts(program, self.options, self.homes, self.variable, self.storage)
        self.calls = OperatorCosts(program, self.prices, self.options, self.fates)
        self.fixed = (*self._operators(), *self.weights.terms(), *self._agreements(menus))
        self.variables = tuple(self._variables())
        self.parts = (
            None if program.forms is None else FormParts(program, program.forms, self.options)
        )

    def model(self, joint: Collection[int] = ()) -> Model:
        """The model; the flows in `joint` are exact where several readers share a movement, of
        others each reader pays a share.
        """
        variables, terms = list(self.variables), list(self.fixed)
        for number in range(len(self.program.flows)):
            if number in joint:
                variable, more = self.flows.joint(number, len(variables))
                variables.append(variable)
                terms += more
            else:
                terms += self.flows.pairwise(number)
        return Model(ROWS, tuple(variables), tuple(terms))

    def _allowed(self, index: int) -> Iterable[Mapping[str, Axes]] | None:
        """All assignments that pins allow; None where there are none."""
        operator = self.program.operators[index]
        allowed = self.program.pinned.allowed(operator.place, operator.rule, self.mesh)
        return allowed and filter(allowed, assignments(operator.rule, self.mesh))

    def _variables(self) -> Iterator[Variable]:
        for operator, options in zip(self.program.operators, self.options, strict=True):
            yield Variable(f"{operator.function}:{operator.node.key}", tuple(range(len(options))))
        for weight, found in self.homes.items():
            yield Variable(self.program.weights[weight].targets[0], found)

    # Terms

    def _operators(self) -> Iterator[Term]:
        for index in range(len(self.options)):
            flows = self.program.operators[index].flows
            rows = [count * self.calls.rows(index, flags) for flags, count in flows]
            costs = np.sum(rows, axis=0).reshape(1, -1, PARTS)
            size = costs.shape[1]
            yield Term((View(index, np.arange(size), size),), ((costs, None),), PASSES, "operator")

    def _agreements(self, menus: Sequence[Menu]) -> Iterator[Term]:
        """What is impossible of weights that several operators read."""
        for found in agreements(self.program, self.mesh, menus, self.homes, self.variable):
            views = tuple(
                View(
                    variable,
                    self.options[variable].choice
                    if variable < len(self.options)
                    else np.arange(size),
                    size,
                )
                for variable, size in zip(found.scope, found.legal.shape, strict=True)
            )
            costs = np.zeros((1, 1, 1, 1))
            yield Term(views, ((costs, found.legal[None]),), slice(0, 1), "agreement")

    # Solutions

    def evaluate(self, values: Sequence[int], prices: Floats) -> Floats:
        """The rows of a solution, with the alternatives that are best under `prices`."""
        found = np.zeros(len(ROWS))
        for term in self.fixed:
            found[term.rows] += term.chosen(prices, values)
        for number, flow in enumerate(self.program.flows):
            found[PASSES] += flow.count * self.flows.rows(number, values, prices)[0]
        return found

    def unshared(self, values: Sequence[int], prices: Floats) -> dict[int, float]:
        """What flows cost beyond the shares that their readers pay, where that is anything."""
        found = {}
        for number, flow in enumerate(self.program.flows):
            if len(self.flows.edges[number]) > 1:
                terms = self.flows.pairwise(number)
                paid = sum(float(t.chosen(prices, values) @ prices[PASSES]) for t in terms)
                rows, _ = self.flows.rows(number, values, prices)
                beyond = flow.count * float(rows @ prices[PASSES]) - paid
                if beyond > ROUNDING * paid:
                    found[number] = beyond
        return found

    def call_rows(self, block: Block, values: Sequence[int], prices: Floats) -> Floats:
        """The rows of one call of a block (of passes alone)."""
        found = np.zeros(PARTS)
        for index, flags in block.operators:
            choice, fate = divmod(values[index], len(self.options[index].fates))
            found += self.calls.rows(index, flags)[choice, fate]
        for number in block.flows:
            found += self.flows.rows(number, values, prices)[0]
        return found
