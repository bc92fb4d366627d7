"""What a device computes in the calls of a function, forward and backward, whatever its body: the
whole batch at once or its share of it, as if the device had all the memory.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from parloom.cost.walk import Walker
from parloom.ir.adjacent import joined_parameters
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, FlatNode, Function, Graph, Node, Ref, TensorSpec
from parloom.ir.mesh import part_of
from parloom.ir.ops import Site, op_of
from parloom.search.choices import menu_of
from parloom.search.folding import program_of
from parloom.search.meshes import logical_meshes
from parloom.search.prices import BACKWARD, FORWARD, Prices
from parloom.search.program import Flags, Operator
from parloom.search.request import Request

Flows = tuple[tuple[Flags, int], ...]
"""By the operands of a call that gradients flow through, how many calls there are."""


class OneDevice:
    """Times (ps) of single calls on a device of the cluster of `request`, which shares each with so
    many others as it can best be shared; of calls that are made alike, of operands of the same
    shapes, one is priced.
    """

    def __init__(self, request: Request, share: int = 1) -> None:
        self.graph = request.graph
        self.inputs = {entry.value.name: entry for entry in self.graph.inputs}
        (mesh,) = logical_meshes(part_of(request.cluster, share), 1)
        walker = Walker({}, mesh, request.cluster, request.machine.kernels)
        self._prices = Prices(program_of(self.graph, factorize(self.graph)), walker)
        self._known: dict[object, int] = {}

    @cached_property
    def flowing(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """By functions and their calls, the values that operators read and that gradients flow
        through.
        """
        flowing = {entry.value.name for entry in self.graph.inputs if entry.trainable}
        found = defaultdict[str, defaultdict[str, set[str]]](lambda: defaultdict(set))
        for flat in self.graph.flat():
            flags = tuple(name in flowing for name in flat.operands)
            made = zip(flat.results, flowing_results(flat.node, flags), strict=True)
            flowing.update(name for name, flows in made if flows)
            pairs = zip(flat.node.refs, flat.operands, strict=True)
            found[flat.function][flat.prefix].update(own for own, name in pairs if name in flowing)
        return {
            function: {prefix: frozenset(own) for prefix, own in calls.items()}
            for function, calls in found.items()
        }

    def ps(
        self,
        node: Node,
        operands: Sequence[TensorSpec],
        flows: Flows,
        adjacent: tuple[int, ...] = (),
    ) -> int:
        """The time of all calls that `flows` counts; `adjacent` see `Operator`."""
        results = tuple(value.spec for value in node.results)
        args = _without_names(node.args), _without_names(node.kwargs)
        key = node.op, args, tuple(operands), results, flows, adjacent
        if key not in self._known:
            rule = op_of(node).rule(Site(node, tuple(operands)))
            self._known[key] = self._ps(
                Operator(
                    "", node, rule, tuple(operands), flows, derived=False, exposed=False,
                    adjacent=adjacent,
                )
            )  # fmt: skip
        return self._known[key]

    def _ps(self, operator: Operator) -> int:
        if operator.is_scalar:
            return 0
        return min(
            sum(
                count * int(self._prices.alone(operator, choice, flags)[[FORWARD, BACKWARD]].sum())
                for flags, count in operator.flows
            )
            for choice in menu_of(operator, self._prices.single).choices
        )


class FunctionCosts:
    """Times (ps) of a whole step in all calls of one function, whatever its body."""

    def __init__(self, device: OneDevice, name: str) -> None:
        self.device, self.name = device, name
        # The values that gradients flow through in each kind of calls, and how many these are.
        self.kinds = tuple(Counter(device.flowing.get(name, {}).values()).items())
        # The inputs of the graph that inputs of the function are in its first call.
        self.bound = _bound(device.graph, name)

    def of(self, body: Function) -> int:
        """The time of all its operators."""
        return sum(self.each(body).values())

    def each(self, body: Function) -> Mapping[str, int]:
        """The time of each operator, by its key."""
        specs, flowing = body.specs(), self.flowing(body)
        found = {}
        for node in (item for item in body.body if isinstance(item, Node)):
            every = [tuple(name in own for name in node.refs) for own in flowing]
            operands = [specs[name] for name in node.refs]
            found[node.key] = self.device.ps(
                node, operands, self.flows(every), self._adjacent(node)
            )
        return found

    def _adjacent(self, node: Node) -> tuple[int, ...]:
        """The arguments that are weights which may lie one after the other."""
        operands = tuple(self.bound.get(name, "") for name in node.refs)
        flat = FlatNode(self.name, "", node, operands, ())
        return tuple(position for position, _ in joined_parameters(flat, self.device.inputs))

    def flowing(self, body: Function) -> Sequence[Collection[str]]:
        """The values of a body that gradients flow through, in each kind of calls."""
        makers = {v.name for item in body.body if isinstance(item, Node) for v in item.results}
        found = [set(flowing - makers) for flowing, _ in self.kinds]
        for node in (item for item in body.body if isinstance(item, Node)):
            for own in found:
                flags = tuple(name in own for name in node.refs)
                made = zip(node.results, flowing_results(node, flags), strict=True)
                own.update(value.name for value, flows in made if flows)
        return found

    def flows(self, every: Sequence[Flags]) -> Flows:
        """How many calls there are by the operands that gradients flow through, which are these in
        each kind of calls.
        """
        counts = Counter[Flags]()
        for flags, (_, count) in zip(every, self.kinds, strict=True):
            counts[flags] += count
        return tuple(sorted(counts.items()))


def _bound(graph: Graph, name: str) -> Mapping[str, str]:
    if name == graph.main.name:
        return {value.name: value.name for value in graph.main.inputs}
    (function,) = (own for own in graph.functions if own.name == name)
    calls = (item for item in graph.main.body if isinstance(item, Call) and item.function == name)
    call = next(calls, None)
    args = call.args if call else ()
    return {value.name: arg for value, arg in zip(function.inputs, args, strict=False)}


def flowing_results(node: Node, flags: Flags) -> Flags:
    """Whether gradients flow through the results of a call, by its operands."""
    op = op_of(node)
    flows = op.differentiable and any(flags)
    return tuple(
        flows and value.spec.is_float and at not in op.detached
        for at, value in enumerate(node.results)
    )


def _without_names(arg: object) -> object:
    """Arguments with a mark in the place of each value, and numbers told apart by their types."""
    if isinstance(arg, Ref):
        return Ref
    return tuple(map(_without_names, arg)) if isinstance(arg, tuple) else (type(arg), arg)
