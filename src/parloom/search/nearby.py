"""What ways of one operator cost where its neighbors stay as they lie: an order to try them in.

Counted are computing, movements from where its operands are made and to where its results are read,
and the reduction of the gradients of weights that it reads. What hides behind computing, changes of
other calls and memory are left to the simulator.
"""

from collections.abc import Iterator, Mapping

from parloom.cost.tasks import PS
from parloom.cost.walk import Walker
from parloom.ir.factors import Factored
from parloom.ir.graph import FlatNode
from parloom.ir.pcg import PCG, TIME, Compute, Movement, PCall, PFunction, PValue, results_of
from parloom.ir.step_program import MAX_BUCKET_BYTES
from parloom.search.choices import Choice, menu_of
from parloom.search.folding import program_of
from parloom.search.prices import KEPT, Prices
from parloom.search.program import Axes, State


class Nearby:
    """Prices of the ways of `flat` in the plan that `pcg` was lowered from."""

    def __init__(self, factored: Factored, pcg: PCG, walker: Walker, flat: FlatNode) -> None:
        self.mesh, self.flat = pcg.decisions.mesh, flat
        self.walker = Walker({}, self.mesh, walker.cluster, walker.kernels)
        program = program_of(factored.graph, factored)
        self.prices = Prices(program, self.walker)
        self.index = program.index[flat.key]
        self.operator = program.operators[self.index]
        self.weights = {p.input.value.name for p in pcg.parameters}
        function = function_of(pcg, flat)
        made = (v for item in function.body for v in results_of(item))
        values = {value.name: value for value in (*function.inputs, *made)}
        self.sources = [values[name] for name in flat.node.refs]
        self.readers = list(_readers(pcg, flat))

    def ps(self, way: Mapping[str, Axes]) -> float:
        """The price of a way; infinite where a movement is not possible."""
        choices = menu_of(self.operator, self.prices.single, (way,)).choices
        return min((self._price(choice) for choice in choices), default=float("inf"))

    def _price(self, choice: Choice) -> float:
        flags = self.operator.flows[0][0]
        total = float(self.prices.operator(self.index, choice, flags)[:KEPT].sum())
        for source, flat_id, wanted in zip(
            self.sources, self.flat.operands, choice.operands, strict=True
        ):
            if flat_id in self.weights:
                total += self._reduction(source, wanted)
            else:
                total += self._movement(source, _state(source), wanted)
        for result, reader in self.readers:
            total += self._movement(reader, choice.results[result], _state(reader))
        return total

    def _movement(self, value: PValue, source: State, target: State) -> float:
        price = self.prices.movement(value.spec, value.differentiable, source, target)
        return float("inf") if price is None else float(price[:KEPT].sum())

    def _reduction(self, weight: PValue, wanted: State) -> float:
        """Its share of a full bucket; what hides it is not known here."""
        if self.mesh.size(wanted.varying) < 2:
            return 0.0
        whole = self.walker.exchange("all_reduce", wanted.varying, MAX_BUCKET_BYTES).seconds
        return PS * whole * self.prices.held_bytes(weight.spec, wanted) / MAX_BUCKET_BYTES


def _readers(pcg: PCG, flat: FlatNode) -> Iterator[tuple[int, PValue]]:
    """Each of an operator's results as other operators read it, also those of other calls."""
    calls = [item for item in pcg.main.body if isinstance(item, PCall)]
    function = function_of(pcg, flat)
    results = {value.name: index for index, value in enumerate(flat.node.results)}
    yield from _read(function, results)
    if function is not pcg.main:
        (own,) = (call for call in calls if call.prefix == flat.prefix)
        pairs = zip(function.outputs, own.results, strict=True)
        results = {o.name: results[i.name] for i, o in pairs if i.name in results}
        yield from _read(pcg.main, results)
    for call in calls:
        callee = pcg.by_name[call.function]
        pairs = zip(call.args, callee.inputs, strict=True)
        yield from _read(callee, {i.name: results[o.name] for o, i in pairs if o.name in results})


def _read(function: PFunction, results: Mapping[str, int]) -> Iterator[tuple[int, PValue]]:
    """The values that operators of a function read which are, or are moved from, `results`."""
    roots = dict(results)
    for item in function.body:
        if isinstance(item, Movement) and item.operand.name in roots:
            roots[item.result.name] = roots[item.operand.name]
        elif isinstance(item, Compute):
            for value in item.operands:
                if value.name in roots:
                    yield roots[value.name], value


def function_of(pcg: PCG, flat: FlatNode) -> PFunction:
    """The lowered function in which an operator runs."""
    for item in pcg.main.body:
        if isinstance(item, PCall) and item.prefix == flat.prefix:
            return pcg.by_name[item.function]
    return pcg.main


def _state(value: PValue) -> State:
    varying = tuple(sorted(axis for axis in value.varying if axis != TIME))
    return State(value.layout.without((TIME,)), varying)
