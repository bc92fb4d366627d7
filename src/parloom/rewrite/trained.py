"""Whether a rewrite makes more gradients of weights than the model does.

What is made of weights alone has a gradient where one of them trains: of a frozen weight and the
product of two small factors that train, one as large as the frozen weight, in every pass.
"""

from collections.abc import Sequence

from parloom.ir.graph import Function, Graph, Node
from parloom.ir.stages import ARRIVING
from parloom.rewrite.horizontal import flowing, reached


class Trained:
    """The values of a graph to which gradients flow, and those that are made of weights alone."""

    def __init__(self, graph: Graph) -> None:
        given = {e.value.name for e in graph.inputs if e.kind in ("batch", ARRIVING)}
        self._flowing, self._varying = flowing(graph), reached(graph, given)

    def grows(self, function: Function, new: Sequence[Node]) -> bool:
        """Whether new operators of a function make of weights alone what has a gradient, and more
        elements than those of the weights that train.
        """
        specs, varying = function.specs(), set(self._varying[function.name])
        trained = {name: frozenset({name}) for name in self._flowing[function.name]}
        for node in new:
            made = [value.name for value in node.results]
            if not varying.isdisjoint(node.refs):
                varying.update(made)
                continue
            own = frozenset[str]().union(*(trained.get(name, ()) for name in node.refs))
            trained |= dict.fromkeys(made, own)
            most = sum(specs[name].num_elements for name in own)
            if own and any(value.spec.num_elements > most for value in node.results):
                return True
        return False
