"""Nodes that compute nothing new, removed from a flat graph (before folding)."""

from collections.abc import Iterator
from dataclasses import replace

from parloom.ir.bags import with_bags
from parloom.ir.graph import Graph, Node, numbered, rename_node
from parloom.ir.positions import with_views_for_ranges


def simplified(graph: Graph) -> Graph:
    """The graph without idle detaches, copies that only a view reads, and dead nodes.

    Reads by position are views, and embedding bags stand alone.
    """
    graph = without_copies_for_views(without_idle_detach(graph))
    return without_dead_nodes(with_bags(with_views_for_ranges(graph)))


def nodes_of(graph: Graph) -> Iterator[Node]:
    """The nodes of main, which has no calls yet."""
    for item in graph.main.body:
        assert isinstance(item, Node), "graphs are simplified before folding"
        yield item


def without_dead_nodes(graph: Graph) -> Graph:
    """The graph without nodes that neither loss, outputs nor updates need."""
    needed = set(graph.main.outputs)
    kept: list[Node] = []
    for item in reversed(tuple(nodes_of(graph))):
        if any(value.name in needed for value in item.results):
            needed.update(item.refs)
            kept.append(item)
    return replace(graph, main=replace(graph.main, body=numbered(tuple(reversed(kept)))))


def without_idle_detach(graph: Graph) -> Graph:
    """The graph without `detach` where no gradient would flow anyway.

    In evaluation that is everywhere; in training, where no trainable parameter reaches it.
    """
    flows = {i.value.name for i in graph.inputs if i.trainable and graph.training}
    idle: set[str] = set()
    for item in nodes_of(graph):
        reached = any(name in flows for name in item.refs)
        if item.op != "detach":
            flows.update(v.name for v in item.results if reached and v.spec.is_float)
        elif not reached:
            idle.add(item.results[0].name)
    return without(graph, idle)


def without_copies_for_views(graph: Graph) -> Graph:
    """The graph without contiguous clones that only views read: a view is a reshape, which copies.

    Whether a trace has such a clone depends on the strides that the tracing device gives.
    """
    readers: dict[str, set[str]] = {}
    for item in nodes_of(graph):
        for name in item.refs:
            readers.setdefault(name, set()).add(item.op)
    clones = {
        item.results[0].name
        for item in nodes_of(graph)
        if item.op == "clone" and item.kwargs == (("memory_format", "contiguous_format"),)
    }
    returned = set(graph.main.outputs)
    return without(graph, {c for c in clones - returned if readers.get(c) == {"view"}})


def without(graph: Graph, idle: set[str]) -> Graph:
    """The graph without the nodes that define `idle`; their operands take their places."""
    if not idle:
        return graph
    names: dict[str, str] = {}
    body: list[Node] = []
    for item in nodes_of(graph):
        item = rename_node(item, names)
        if item.results and item.results[0].name in idle:
            names[item.results[0].name] = item.refs[0]
        else:
            body.append(item)
    return replace(
        graph,
        main=replace(
            graph.main,
            body=numbered(tuple(body)),
            outputs=tuple(dict.fromkeys(names.get(n, n) for n in graph.main.outputs)),
        ),
        loss=names.get(graph.loss, graph.loss) if graph.loss else None,
        outputs=tuple((user, names.get(v, v)) for user, v in graph.outputs),
        updates=tuple((user, names.get(v, v)) for user, v in graph.updates),
    )
