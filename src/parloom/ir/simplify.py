"""Dead nodes and detaches that stop nothing, removed from a flat graph."""

from dataclasses import replace

from parloom.ir.graph import Graph, Node, numbered, rename_node


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph without nodes that neither loss, outputs nor updates need (no calls in main)."""
    needed = set(graph.main.outputs)
    kept: list[Node] = []
    for item in reversed(graph.main.body):
        assert isinstance(item, Node), "dead nodes are removed before folding"
        if any(value.name in needed for value in item.results):
            needed.update(item.refs)
            kept.append(item)
    return replace(graph, main=replace(graph.main, body=numbered(tuple(reversed(kept)))))


def without_idle_detach(graph: Graph) -> Graph:
    """The graph without `detach` where no gradient would flow anyway.

    In evaluation that is everywhere; in training, where no trainable parameter reaches it.
    """
    flows = {i.value.name for i in graph.inputs if i.trainable and graph.training}
    names: dict[str, str] = {}
    body: list[Node] = []
    for item in graph.main.body:
        assert isinstance(item, Node), "detaches are removed before folding"
        item = rename_node(item, names)
        reached = any(name in flows for name in item.refs)
        if item.op == "detach" and not reached:
            names[item.results[0].name] = item.refs[0]
            continue
        if reached and item.op != "detach":
            flows.update(v.name for v in item.results if v.spec.is_float)
        body.append(item)
    return replace(
        graph,
        main=replace(
            graph.main,
            body=numbered(tuple(body)),
            outputs=tuple(dict.fromkeys(names.get(n, n) for n in graph.main.outputs)),
        ),
        loss=names.get(graph.loss, graph.loss) if graph.loss else None,
        outputs=tuple((k, names.get(v, v)) for k, v in graph.outputs),
        updates=tuple((k, names.get(v, v)) for k, v in graph.updates),
    )
