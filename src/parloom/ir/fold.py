"""Repeated blocks as functions and calls, and back.

A block is what one module of a list computes: a run of nodes below a path `anything.N`. Runs with
one signature (operators, arguments up to the names of values, shapes, dtypes, paths below the
block) that occur at least twice become a function with a call for each. Outermost lists are tried
first; what does not repeat there is tried one list further in, and else stays inline.

What the user recomputes as a whole becomes a function even where it does not repeat, so that it can
be recomputed.

Numbers that are added or multiplied may differ from block to block, as the rates of stochastic
depth do: then they are constants that the calls pass.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from parloom.errors import InputError
from parloom.ir.graph import (
    CACHE,
    Call,
    Function,
    Graph,
    Input,
    Node,
    Ref,
    TensorSpec,
    Value,
    numbered,
    rename_node,
)
from parloom.ir.naming import Names, snake_case

# A lone layer (`Linear`, `EmbeddingBag`) is no block, though some layers are several operators.
MIN_NODES = 2
MIN_NODES_OF_LEAF = 8
# Operators whose second argument may be a 0-dim tensor instead of a number, with the same result.
SCALED = frozenset({"add", "sub", "mul", "div"})
FULL_PRECISION = ("float32", "float64")  # others would round the number first
NUMBER = "%number"
ORDINAL = re.compile(r"@\d+")
ENTRY = re.compile(r"\d+(@\d+)?")
Body = tuple[Node | Call, ...]
Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """All nodes below one block prefix, with where they start in the body."""

    prefix: str
    start: int
    nodes: tuple[Node, ...]

    @property
    def defined(self) -> tuple[str, ...]:
        return tuple(v.name for n in self.nodes for v in n.results)

    @property
    def is_block(self) -> bool:
        """Whether it is big enough to be worth a function."""
        leaf = all(node.path == self.prefix for node in self.nodes)
        return len(self.nodes) >= (MIN_NODES_OF_LEAF if leaf else MIN_NODES)

    def operands(self) -> tuple[str, ...]:
        """Values from outside, in order of first use."""
        own = set(self.defined)
        refs = (name for node in self.nodes for name in node.refs)
        return tuple(dict.fromkeys(name for name in refs if name not in own))


def fold(graph: Graph, classes: Mapping[str, str] | None = None) -> Graph:
    """The graph with repeated blocks as functions; `classes` maps module paths to class names.

    Evaluates the same operators in the same order. A function's inputs are activations first, then
    the block's parameters and buffers, named as below its prefix.
    """
    folder = Folder(graph, classes or {})
    depth = 1
    while folder.has_depth(depth):
        folder.fold_depth(depth)
        depth += 1
    folder.fold_recomputed()
    return folder.graph(graph)


def outline(graph: Graph, modules: Sequence[str]) -> Graph:
    """The graph with each of `modules` as a block; equal ones share a function.

    Evaluates the same operators in the same order, under the same keys. Raises `InputError` for a
    module whose operators do not stand together in main, or are too few for a block.
    """
    folder = Folder(replace(graph, recompute=tuple(modules)), {})

    def outermost(path: str) -> str:
        inside = (prefix_of_module(path, module) for module in modules)
        return min(filter(None, inside), key=len, default="")

    folder.fold_segments(segments(folder.body, outermost))
    calls = {item.prefix for item in folder.body if isinstance(item, Call)}
    for module in modules:
        if module not in calls:
            raise InputError(
                f"the rewrite 'block {module}' does not apply to {graph.name}: there is no such"
                " module in main, other operators or blocks run between its own, or it has too few"
            )
    return folder.graph(graph)


class Folder:
    """The state of folding one graph: the body so far and the functions found."""

    def __init__(self, graph: Graph, classes: Mapping[str, str]) -> None:
        self.body: Body = graph.main.body
        self.functions: list[Function] = list(graph.functions)
        self.names = Names(frozenset(f.name for f in graph.functions))
        self.classes = classes
        self.inputs = {i.value.name: i for i in graph.inputs}
        self.specs = graph.main.specs()
        self.returned = set(graph.main.outputs)
        self.recomputed = frozenset(graph.recompute)

    def graph(self, graph: Graph) -> Graph:
        """`graph` as it is folded so far."""
        inputs = tuple(self.inputs.values())
        main = replace(graph.main, body=numbered(self.body), inputs=tuple(i.value for i in inputs))
        return replace(graph, functions=tuple(self.functions), main=main, inputs=inputs)

    def has_depth(self, depth: int) -> bool:
        return any(isinstance(i, Node) and block_prefix(i.path, depth) for i in self.body)

    def fold_depth(self, depth: int) -> None:
        """Fold all repeated segments whose prefix has `depth` list entries."""
        self.fold_segments(segments(self.body, partial(block_prefix, depth=depth)))

    def fold_recomputed(self) -> None:
        """Make functions of what is recomputed and in no list, outermost modules first."""
        for prefix in sorted(self.recomputed, key=lambda path: path.count(".")):
            self.fold_segments(segments(self.body, partial(prefix_of_module, module=prefix)))

    def fold_segments(self, found: Iterator[Segment]) -> None:
        """Fold those segments that repeat or are recomputed."""
        groups: dict[Signature, list[Segment]] = {}
        for segment in found:
            if segment.is_block:
                groups.setdefault(self.signature(segment), []).append(segment)
        users = readers(self.body)
        replaced: dict[int, tuple[Call, int]] = {}
        for group in groups.values():
            if len(group) > 1 or group[0].prefix in self.recomputed:
                group = self.with_constants(group)
                function, calls = self.make_function(group, users)
                self.functions.append(function)
                for segment, call in zip(group, calls, strict=True):
                    replaced[segment.start] = (call, len(segment.nodes))
        self.body = tuple(substituted(self.body, replaced))

    def signature(self, segment: Segment) -> Signature:
        """Equal for segments that one function can stand for."""
        local = {name: f"%{i}" for i, name in enumerate(segment.defined)}
        operands = segment.operands()
        local.update((name, f"@{i}") for i, name in enumerate(operands))
        nodes = []
        for node in segment.nodes:
            renamed = rename_node(node, local)
            args = (*renamed.args[:1], NUMBER, *renamed.args[2:])
            arguments = (
                exact(args if self.is_scaled(node) else renamed.args),
                exact(renamed.kwargs),
            )
            nodes.append((node.op, arguments, renamed.results, below(node.path, segment.prefix)))
        roles = tuple((self.role(name, segment.prefix), self.specs[name]) for name in operands)
        return (self.class_of(segment.prefix), roles, tuple(nodes))

    def is_scaled(self, node: Node) -> bool:
        """Whether the node's second argument is a number that a 0-dim tensor may stand for."""
        if node.op not in SCALED or len(node.args) < 2 or not isinstance(node.args[1], float):
            return False
        first = node.args[0]
        return isinstance(first, Ref) and self.specs[first.name].dtype in FULL_PRECISION

    def with_constants(self, group: list[Segment]) -> list[Segment]:
        """The segments with constants in place of the numbers that differ between them."""
        first = group[0].nodes
        differ = {
            position
            for position, node in enumerate(first)
            if self.is_scaled(node)
            and len({repr(segment.nodes[position].args[1]) for segment in group}) > 1
        }
        if not differ:
            return group
        return [
            replace(
                segment,
                nodes=tuple(
                    self.with_constant(node) if position in differ else node
                    for position, node in enumerate(segment.nodes)
                ),
            )
            for segment in group
        ]

    def with_constant(self, node: Node) -> Node:
        """The node with a constant of the program in place of its number."""
        number, target = node.args[1], f"number {node.args[1]!r}"
        constants = (i for i in self.inputs.values() if i.kind == "constant")
        known = next((i.value.name for i in constants if i.target == target), None)
        name = known or Names(frozenset(self.specs)).take(target)
        if known is None:
            value = Value(name, TensorSpec((), "float64"))
            self.inputs[name] = Input(value, "constant", target, data=number)
            self.specs[name] = value.spec
        return replace(node, args=(node.args[0], Ref(name), *node.args[2:]))

    def role(self, name: str, prefix: str) -> tuple[str, str]:
        """(kind, name below the prefix) of an operand; all activations are alike."""
        found = self.inputs.get(name)
        if found is None or found.kind in ("batch", CACHE, "constant"):
            return ("activation", "")
        return (found.kind, state_name(found, prefix))

    def class_of(self, prefix: str) -> str:
        return self.classes.get(ORDINAL.sub("", prefix), "")

    def make_function(
        self, group: list[Segment], users: Mapping[str, Sequence[int]]
    ) -> tuple[Function, list[Call]]:
        """The function for a group of equal segments, and the call for each of them.

        It returns what any of its instances needs outside.
        """
        first = group[0]
        defined = {segment.start: segment.defined for segment in group}
        positions = sorted({i for s in group for i in self.escaping(s, defined[s.start], users)})
        operands = first.operands()
        roles = [self.role(name, first.prefix) for name in operands]
        order = sorted(range(len(operands)), key=lambda i: roles[i][0] != "activation")
        local = self.local_names(first, operands, roles, order)
        body = tuple(
            replace(rename_node(n, local), path=below(n.path, first.prefix)) for n in first.nodes
        )
        stem = snake_case(self.class_of(first.prefix)) or "block"
        function = Function(
            self.names.take(stem),
            tuple(Value(local[operands[i]], self.specs[operands[i]]) for i in order),
            numbered(body),
            tuple(defined[first.start][p] for p in positions),
        )
        calls = []
        for segment in group:
            actual = segment.operands()
            names = [defined[segment.start][p] for p in positions]
            results = tuple(Value(name, self.specs[name]) for name in names)
            args = tuple(actual[i] for i in order)
            calls.append(Call(function.name, segment.prefix, args, results))
        return function, calls

    def escaping(
        self, segment: Segment, defined: Sequence[str], users: Mapping[str, Sequence[int]]
    ) -> Iterator[int]:
        """Positions among the values that a segment defines of those read outside of it."""
        inside = range(segment.start, segment.start + len(segment.nodes))
        for position, name in enumerate(defined):
            if name in self.returned or any(i not in inside for i in users.get(name, ())):
                yield position

    def local_names(
        self,
        segment: Segment,
        operands: tuple[str, ...],
        roles: list[tuple[str, str]],
        order: list[int],
    ) -> dict[str, str]:
        """Names inside the function: operands get readable ones, results keep theirs."""
        names = Names(frozenset(segment.defined))
        local: dict[str, str] = {}
        for index in order:
            kind, relative = roles[index]
            spec = self.specs[operands[index]]
            wish = relative if kind != "activation" else "hidden" if spec.is_float else "index"
            if kind == "activation" and spec.dtype == "bool":
                wish = "mask"
            elif kind == "activation" and not spec.shape:
                wish = "number"
            local[operands[index]] = names.take(wish)
        return local


def exact(arg: object) -> object:
    """An argument in a form whose equality tells 1, 1.0 and True apart and knows nan."""
    if isinstance(arg, tuple):
        return tuple(exact(a) for a in arg)
    return (type(arg).__name__, repr(arg) if isinstance(arg, float) else arg)


def state_name(found: Input, prefix: str) -> str:
    """The name of a parameter below the block's prefix, by whichever of its names is below it.

    A parameter of another module keeps its whole name.
    """
    plain = ORDINAL.sub("", prefix)
    for name in (found.target, *found.aliases):
        if name.startswith(plain + "."):
            return name[len(plain) + 1 :]
    return found.target


def block_prefix(path: str, depth: int) -> str:
    """The path up to its `depth`-th list entry (`h.3`), or ``""`` if it has fewer."""
    parts = path.split(".")
    entries = [i for i, part in enumerate(parts) if i > 0 and ENTRY.fullmatch(part)]
    return ".".join(parts[: entries[depth - 1] + 1]) if len(entries) >= depth else ""


def prefix_of_module(path: str, module: str) -> str:
    """The path of a module for itself and what is in it, else ``""``."""
    return module if f"{path}.".startswith(f"{module}.") else ""


def below(path: str, prefix: str) -> str:
    """A path relative to a block prefix."""
    return path[len(prefix) + 1 :]


def segments(body: Body, prefix_of: Callable[[str], str]) -> Iterator[Segment]:
    """Blocks of the body whose nodes are contiguous (others would give a name to two calls).

    `prefix_of` says by its path in which block a node is, if any.
    """
    runs: dict[str, list[tuple[int, list[Node]]]] = {}
    previous = ""
    for position, item in enumerate(body):
        prefix = prefix_of(item.path) if isinstance(item, Node) else ""
        if prefix and isinstance(item, Node):
            found = runs.setdefault(prefix, [])
            if prefix != previous:
                found.append((position, []))
            found[-1][1].append(item)
        previous = prefix
    for prefix, found in runs.items():
        if len(found) == 1:
            start, nodes = found[0]
            yield Segment(prefix, start, tuple(nodes))


def readers(body: Body) -> Mapping[str, Sequence[int]]:
    """Positions in the body that read each value."""
    users: dict[str, list[int]] = {}
    for position, item in enumerate(body):
        for name in dict.fromkeys(item.refs if isinstance(item, Node) else item.args):
            users.setdefault(name, []).append(position)
    return users


def substituted(body: Body, replaced: Mapping[int, tuple[Call, int]]) -> Iterator[Node | Call]:
    """The body with calls in place of the nodes they stand for."""
    position = 0
    while position < len(body):
        if position in replaced:
            call, length = replaced[position]
            yield call
            position += length
        else:
            yield body[position]
            position += 1


def unfold(graph: Graph) -> Graph:
    """The graph as one flat main, every call replaced by its function's body."""
    names = Names(frozenset(graph.main.specs()))
    body = tuple(inlined(graph, graph.main.body, {}, "", names))
    return replace(graph, functions=(), main=replace(graph.main, body=numbered(body)))


def inlined(
    graph: Graph, body: Body, bound: dict[str, str], prefix: str, names: Names
) -> Iterator[Node]:
    """Nodes of a body with values renamed by `bound`, paths below `prefix`, and calls inlined."""
    for item in body:
        if isinstance(item, Node):
            path = ".".join(part for part in (prefix, item.path) if part)
            yield replace(rename_node(item, bound), path=path)
            continue
        callee = graph.by_name[item.function]
        actual = [bound.get(a, a) for a in item.args]
        inner = dict(zip((v.name for v in callee.inputs), actual, strict=True))
        outer = [bound.get(v.name, v.name) for v in item.results]
        inner.update(zip(callee.outputs, outer, strict=True))
        for name in callee.specs():
            if name not in inner:
                inner[name] = names.take(name)
        below_prefix = ".".join(part for part in (prefix, item.prefix) if part)
        yield from inlined(graph, callee.body, inner, below_prefix, names)
