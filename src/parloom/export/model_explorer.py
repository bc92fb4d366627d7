"""Google's Model Explorer: the program as its JSON graph, with layouts and predicted times.

A node for each operator and each input; its namespace is the module path. The file is what
`model_explorer.graph_builder` describes, and opens in Model Explorer as any model file.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parloom.cost.ledger import MAIN
from parloom.ir.factors import factorize
from parloom.ir.graph import Call, FlatNode, Graph
from parloom.ir.layout import REPLICATED, describe
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, PParameter
from parloom.ir.plan_json import plan_hash
from parloom.report.case import Case
from parloom.report.explain import PS
from parloom.report.page.graph import operator_times

FILE = "model_explorer.json"
INPUTS = "inputs"

Node = dict[str, Any]


def model_explorer(graph: Graph, cases: Sequence[Case]) -> str:
    """The text of the file; `graph` is rewritten as the plan says, `cases` are of its stages."""
    first = cases[0]
    document = {
        "label": f"{graph.name}: plan {plan_hash(first.plan)}",
        "graphs": [{"id": graph.name, "nodes": list(_nodes(graph, cases))}],
    }
    return json.dumps(document, indent=1) + "\n"


def _nodes(graph: Graph, cases: Sequence[Case]) -> Iterator[Node]:
    times = operator_times(cases)
    calls = Counter(item.function for item in graph.main.body if isinstance(item, Call))
    stages = {f.key: i for i, case in reversed([*enumerate(cases)]) for f in case.pcg.graph.flat()}
    makers: dict[str, tuple[str, str]] = {}
    for entry in graph.inputs:
        if entry.kind != "constant":
            name = f"{entry.kind}:{entry.target}"
            makers[entry.value.name] = name, "0"
            yield _input(name, entry.kind, entry.target, cases)
    factored = factorize(graph)
    decided = {node.key: dict(node.factors) for node in cases[0].plan.decisions.nodes}
    for case in cases[1:]:
        decided |= {node.key: dict(node.factors) for node in case.decisions.nodes}
    for flat in graph.flat():
        place = MAIN if flat.function == graph.main.name else flat.function
        own_ps, moved_ps = times.get((place, flat.node.key), (0, 0))
        stage = stages.get(flat.key, 0)
        count = calls[flat.function] or 1
        attributes = {
            "op": flat.node.op.removeprefix("parloom."),
            "source": flat.node.source,
            "stage": str(stage) if len(cases) > 1 else "",
            "compute": f"{own_ps / count / PS * 1e6:.3f} us a step",
            "movements": f"{moved_ps / count / PS * 1e6:.3f} us a step",
            "split": ", ".join(
                f"{factor} over {' and '.join(axes)}"
                for factor, axes in sorted(decided.get(flat.key, {}).items())
            ),
        }
        yield {
            "id": flat.key,
            "label": attributes["op"],
            "namespace": flat.key.partition(":")[0].replace(".", "/"),
            "attrs": _attributes(attributes),
            "incomingEdges": _edges(flat, makers),
            "outputsMetadata": _outputs(
                flat, factored.rule(flat.function, flat.node), decided.get(flat.key, {}),
                cases[stage].pcg,
            ),
        }  # fmt: skip
        makers |= {name: (flat.key, str(index)) for index, name in enumerate(flat.results)}


def _attributes(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items() if value]


def _edges(flat: FlatNode, makers: Mapping[str, tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {
            "sourceNodeId": makers[name][0],
            "sourceNodeOutputId": makers[name][1],
            "targetNodeInputId": str(position),
        }
        for position, name in enumerate(flat.operands)
        if name in makers
    ]


def _outputs(
    flat: FlatNode, rule: Rule, factors: Mapping[str, tuple[str, ...]], pcg: PCG
) -> list[dict[str, Any]]:
    mesh, found = pcg.decisions.mesh, []
    for index, value in enumerate(flat.node.results):
        known = all(axis in mesh.names for axes in factors.values() for axis in axes)
        layout = rule.result_layout(index, dict(factors), mesh) if known else REPLICATED
        shape = value.spec.shape
        own = {
            "tensor": f"{value.spec.dtype}{list(shape)}",
            "layout": describe(layout, shape, mesh),
        }
        found.append({"id": str(index), "attrs": _attributes(own)})
    return found


def _input(name: str, kind: str, target: str, cases: Sequence[Case]) -> Node:
    """A parameter, a buffer or a tensor of the batch."""
    module, _, label = target.rpartition(".")
    own = next((p for c in cases for p in c.pcg.parameters if p.input.target == target), None)
    mesh = next((c.mesh for c in cases if own in c.pcg.parameters), cases[0].mesh)
    attributes = {"kind": kind}
    if own is not None:
        spec = own.input.value.spec
        attributes["tensor"] = f"{spec.dtype}{list(spec.shape)}"
        attributes["layout"] = describe(own.layout, spec.shape, mesh)
        attributes |= _stored(own)
    namespace = module.replace(".", "/") if kind in ("parameter", "buffer") else INPUTS
    return {
        "id": name,
        "label": label,
        "namespace": namespace,
        "attrs": _attributes(attributes),
        "outputsMetadata": [{"id": "0", "attrs": _attributes(attributes)}],
    }


def _stored(parameter: PParameter) -> dict[str, str]:
    own = parameter.decision
    stored = {"weight": own.weight, "gradient": own.gradient, "optimizer state": own.optimizer}
    return {
        f"{what} stored": f"over {', '.join(storage.axes)}"
        for what, storage in stored.items()
        if storage.axes
    }
