"""Which values a training program makes gradients of."""

from parloom.ir.graph import Graph
from parloom.ir.ops import op_of


def with_gradients(graph: Graph) -> set[str]:
    """The values by their ids in `Graph.flat` (inputs by their names) that the loss, or what leaves
    the stage, has a gradient with respect to.
    """
    ends = (*graph.leaving, *([graph.loss] if graph.loss else []))
    reached = {graph.flat_ids[name] for name in ends}
    for flat in reversed(tuple(graph.flat())):
        results = zip(flat.results, flat.node.results, strict=True)
        made = any(name in reached and value.spec.is_float for name, value in results)
        if made and flat.node.op != "detach" and op_of(flat.node).differentiable:
            reached.update(flat.operands)
    return reached
