"""The model as a folded graph: each block kind once, its operators with their layout and time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parloom.cost.ledger import MAIN
from parloom.ir.graph import Call, Function, Graph, Node
from parloom.report.case import Case, Place
from parloom.report.explain import PS
from parloom.report.page.parts import in_parts

Document = dict[str, Any]


def graph_view(graph: Graph, cases: Sequence[Case], num_devices: int) -> Document:
    """Functions with nodes and edges, large ones in parts; times are of a step, in seconds, summed
    over all stages and calls of a block kind; shares are of the step, the mean over `num_devices`.
    """
    times, shares = operator_times(cases), _shares(cases, num_devices)
    kinds = Counter(item.function for item in graph.main.body if isinstance(item, Call))
    splits = _splits(cases)
    functions = (graph.main, *(f for f in graph.functions if kinds[f.name]))
    return {
        "functions": [
            part
            for own in functions
            for part in in_parts(_function(graph, own, kinds[own.name] or 1, times, splits, shares))
        ],
    }


def operator_times(cases: Sequence[Case]) -> Mapping[Place, tuple[int, int]]:
    """Picoseconds that operators compute and that values move for them, by place and key."""
    found: dict[Place, list[int]] = defaultdict(lambda: [0, 0])
    for case in cases:
        for place, functions in case.variants.items():
            for function in functions:
                for share in case.shares[function.name]:
                    ps = case.runs[function.name].ps(share)
                    found[place, share.key][share.moves is not None] += ps
    return {place: (computed, moved) for place, (computed, moved) in found.items()}


def _shares(cases: Sequence[Case], num_devices: int) -> Mapping[Place, float]:
    """Which share of the step operators take, the mean over all devices."""
    found = defaultdict[Place, float](float)
    for case in cases:
        weight = case.decisions.num_ranks / num_devices / max(1, case.timeline.step_ps)
        for place, both in operator_times([case]).items():
            found[place] += sum(both) * weight
    return found


def _splits(cases: Sequence[Case]) -> Mapping[Place, Mapping[str, str]]:
    """What each mesh axis splits of an operator, in most calls first."""
    found = defaultdict[Place, dict[str, Counter[str]]](dict)
    for case in cases:
        for place, axes in case.splits.items():
            for axis, ways in axes.items():
                found[place].setdefault(axis, Counter()).update(ways)
    return {
        place: {axis: ", ".join(what for what, _ in c.most_common()) for axis, c in axes.items()}
        for place, axes in found.items()
    }


def _function(
    graph: Graph,
    function: Function,
    calls: int,
    times: Mapping[Place, tuple[int, int]],
    splits: Mapping[Place, Mapping[str, str]],
    shares: Mapping[Place, float],
) -> Document:
    place = MAIN if function is graph.main else function.name
    items = list(_items(function))
    nodes, owners = list[Document](), dict[str, int]()
    for index, (item, count, results) in enumerate(items):
        owners |= dict.fromkeys(results, index)
        nodes.append(
            _operator(
                item,
                times.get((place, item.key), (0, 0)),
                splits.get((place, item.key), {}),
                shares.get((place, item.key), 0.0),
            )
            if isinstance(item, Node)
            else _call(item, count, times, shares)
        )
    edges = Counter[tuple[int, int]]()
    for index, (item, _, _) in enumerate(items):
        for name in item.refs if isinstance(item, Node) else item.args:
            if name in owners and owners[name] != index:
                edges[owners[name], index] += 1
    prefixes = [
        i.prefix for i in graph.main.body if isinstance(i, Call) and i.function == function.name
    ]
    return {
        "name": place,
        "place": place,
        "calls": calls,
        "first": prefixes[0] if prefixes else "",
        "nodes": nodes,
        "edges": [list(edge) for edge in edges],
    }


def _items(function: Function) -> Iterator[tuple[Node | Call, int, tuple[str, ...]]]:
    """Operators, and calls of one block kind one after the other as one, with their results."""
    run: list[Call] = []
    for item in (*function.body, None):
        if isinstance(item, Call) and (not run or _follows(run[-1], item)):
            run.append(item)
            continue
        if run:
            yield run[0], len(run), tuple(v.name for call in run for v in call.results)
            run = []
        if isinstance(item, Call):
            run = [item]
        elif item is not None:
            yield item, 1, tuple(value.name for value in item.results)


def _follows(before: Call, call: Call) -> bool:
    made = {value.name for value in before.results}
    return before.function == call.function and not made.isdisjoint(call.args)


def _operator(
    node: Node, times: tuple[int, int], splits: Mapping[str, str], share: float
) -> Document:
    value = node.results[0] if node.results else None
    return {
        "key": node.key,
        "module": node.path,
        "op": node.op.removeprefix("parloom."),
        "source": node.source,
        "shape": f"{value.spec.dtype}{list(value.spec.shape)}" if value else "",
        "own_s": times[0] / PS,
        "moving_s": times[1] / PS,
        "share": share,
        "splits": dict(splits),
    }


def _call(
    call: Call, count: int, times: Mapping[Place, tuple[int, int]], shares: Mapping[Place, float]
) -> Document:
    own = [found for (place, _), found in times.items() if place == call.function]
    return {
        "key": call.prefix,
        "module": call.prefix,
        "op": f"{call.function} x {count}" if count > 1 else call.function,
        "function": call.function,
        "source": "",
        "shape": f"{call.results[0].spec.dtype}{list(call.results[0].spec.shape)}",
        "own_s": sum(computed for computed, _ in own) / PS,
        "moving_s": sum(moved for _, moved in own) / PS,
        "share": sum(share for (place, _), share in shares.items() if place == call.function),
        "splits": {},
    }
