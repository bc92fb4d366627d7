"""Readable value names: what a person would call them, from module path and operator.

The last node of a leaf module has the module's name (`attn_c_attn`), other nodes the module's and
the operator's (`attn_transpose`); clashes get `_2`, `_3`. Every name is a valid Python identifier
that no generated program uses otherwise.
"""

import builtins
import keyword
import re
from dataclasses import replace

from parloom.ir.graph import CACHE, Call, Function, Graph, Node, Value, rename_node

MAX_LENGTH = 60
RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, *keyword.softkwlist}
    | {"torch", "F", "rt", "ctx", "prefix", "batch", "hoisted", "Tensor", "dtype", "aten"}
    | {"forward", "prologue", "main", "MESH", "PROGRAM", "inf", "nan"}
)
RESULT_NAMES = {
    "batch_norm": ("", "new_running_mean", "new_running_var"),
    "embedding_bag": ("", "offset2bag", "bag_size", "max_indices"),
    "topk": ("values", "indices"),
    "sort": ("values", "indices"),
}


class Names:
    """Hands out identifiers, each once."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self.taken = set(RESERVED | taken)

    def take(self, wish: str) -> str:
        """`wish` as an identifier, with a number appended if it is taken."""
        stem = identifier(wish)
        if stem not in self.taken:
            self.taken.add(stem)
            return stem
        number = 1 if stem in RESERVED else 2
        while f"{stem}_{number}" in self.taken:
            number += 1
        self.taken.add(f"{stem}_{number}")
        return f"{stem}_{number}"


def identifier(text: str) -> str:
    """`text` as an identifier of bounded length: path components are dropped from the front."""
    parts = [re.sub(r"\W", "_", part, flags=re.ASCII) for part in text.split(".") if part]
    name = "_".join(parts)
    while len(name) > MAX_LENGTH and len(parts) > 1:
        parts = parts[1:]
        name = "_".join(parts)
    name = name.strip("_") or "value"
    return f"n{name}" if name[0].isdigit() else name


def snake_case(name: str) -> str:
    """`gpt2_block` for `GPT2Block`, `vit_layer` for `ViTLayer`."""
    name = re.sub(
        r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z]{2})(?=[A-Z])", "_", name
    )
    return name.lower()


def readable(graph: Graph) -> Graph:
    """The graph with every value renamed, in functions as in main."""
    functions = tuple(readable_function(f, graph) for f in graph.functions)
    taken = frozenset(f.name for f in graph.functions)
    names = Names(taken)
    renamed: dict[str, str] = {}
    for kind in ("batch", CACHE, "parameter", "buffer", "constant"):
        for item in graph.of_kind(kind):
            renamed[item.value.name] = names.take(item.target)
    main = rename_body(graph.main, renamed, names, graph)
    inputs = tuple(
        replace(i, value=Value(renamed[i.value.name], i.value.spec)) for i in graph.inputs
    )
    return replace(
        graph,
        functions=functions,
        main=main,
        inputs=inputs,
        loss=renamed[graph.loss] if graph.loss else None,
        outputs=tuple((user, renamed[v]) for user, v in graph.outputs),
        updates=tuple((user, renamed[v]) for user, v in graph.updates),
    )


def readable_function(function: Function, graph: Graph) -> Function:
    """A block function with readable names; its inputs' names are wishes already."""
    names = Names(frozenset(f.name for f in graph.functions))
    renamed = {v.name: names.take(v.name) for v in function.inputs}
    return rename_body(function, renamed, names, graph)


def rename_body(
    function: Function, renamed: dict[str, str], names: Names, graph: Graph
) -> Function:
    """Rename what the body defines; `renamed` is extended in place."""
    last = {item.path: i for i, item in enumerate(function.body) if isinstance(item, Node)}
    parents = {path.rsplit(".", n)[0] for path in last for n in range(1, path.count(".") + 1)}
    body: list[Node | Call] = []
    for position, item in enumerate(function.body):
        if isinstance(item, Node):
            leaf = bool(item.path) and item.path not in parents and last[item.path] == position
            for value, wish in zip(item.results, wishes(item, leaf), strict=True):
                renamed[value.name] = names.take(wish)
            body.append(rename_node(item, renamed))
        else:
            callee = graph.by_name[item.function]
            for value in item.results:
                stem = item.prefix if len(callee.outputs) == 1 else f"{item.prefix}.out"
                renamed[value.name] = names.take(stem)
            args = tuple(renamed[a] for a in item.args)
            results = tuple(Value(renamed[v.name], v.spec) for v in item.results)
            body.append(replace(item, args=args, results=results))
    inputs = tuple(Value(renamed[v.name], v.spec) for v in function.inputs)
    return Function(function.name, inputs, tuple(body), tuple(renamed[n] for n in function.outputs))


def wishes(node: Node, leaf: bool) -> tuple[str, ...]:
    """The names that a node's results should have."""
    op = node.op.rsplit(".", 1)[-1].strip("_")
    path = node.path if leaf else ".".join(p for p in (node.path, op) if p)
    suffixes = RESULT_NAMES.get(node.op, ())
    if len(node.results) == 1 or len(suffixes) < len(node.results):
        return (path,) * len(node.results)
    return tuple(f"{path}.{s}" if s else path for s in suffixes[: len(node.results)])
