"""The graph: what the user's model computes, on one device.

A graph is functions (one per kind of repeated block) plus a main function that calls them with the
block's own parameters; unfolding is a view. Values are named once (SSA), bodies are in execution
order, every node knows the user's module path and source line. Parameters, buffers, batch tensors
and constants are the inputs of main; the loss is inside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from parloom.ir.layout import Layout

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (torch's name without the prefix) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype or "complex" in self.dtype


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the same function."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """An argument that is a dtype."""

    name: str


Arg = Ref | Dtype | None | bool | int | float | str | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's name and spec where it is defined."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call.

    `op` is a key of `ops.OPS` (for ATen operators the packet name: `add`, `linear`); `path` is the
    module path below the function's own prefix, and `index` counts nodes of equal (path, op).
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Value, ...]
    path: str = ""
    index: int = 0
    source: str = ""

    @property
    def key(self) -> str:
        """`attention.query:linear#0`: unique within the function."""
        return f"{self.path}:{self.op}#{self.index}"

    @property
    def refs(self) -> tuple[str, ...]:
        """Names of tensor arguments, in order, with repeats."""
        return tuple(iter_refs((*self.args, *(v for _, v in self.kwargs))))

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        return next((v for k, v in self.kwargs if k == name), default)

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """An argument that may be given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwarg(name, default)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a block function; `prefix` is the module path of this instance of the block."""

    function: str
    prefix: str
    args: tuple[str, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A block kind: formal inputs, body in execution order, names of the values it returns."""

    name: str
    inputs: tuple[Value, ...]
    body: tuple[Node | Call, ...]
    outputs: tuple[str, ...]

    def specs(self) -> dict[str, TensorSpec]:
        """Spec of every value defined in this function."""
        found = {v.name: v.spec for v in self.inputs}
        for item in self.body:
            found.update((v.name, v.spec) for v in item.results)
        return found


CACHE = "cache"  # a kind of input of main


@dataclass(frozen=True, slots=True)
class Input:
    """One input of main.

    `kind` is parameter, buffer, batch, cache (what earlier passes left and this one writes to),
    constant, or in the graph of a pipeline stage arriving (from an earlier one); `target` the
    user's name of it (state-dict name or batch key); `aliases` other names of a tied parameter;
    `data` the nested values of a constant. In the program of one microbatch
    (`ir.microbatches.of_microbatch`) `samples` is the dim of samples of a batch tensor that holds
    those of that microbatch.
    """

    value: Value
    kind: str
    target: str
    trainable: bool = False
    aliases: tuple[str, ...] = ()
    data: Arg = None
    samples: int | None = None


@dataclass(frozen=True)
class Boundary:
    """What the graph of a pipeline stage knows of the other stages.

    `samples` are the dims of samples of the batch; `in_time` says how values that cross between
    stages lie in time; `flowing` are those of them whose gradient is wanted.
    """

    samples: Mapping[str, int] = field(default_factory=dict)
    in_time: Mapping[str, Layout] = field(default_factory=dict)
    flowing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FlatNode:
    """A node seen from the unfolded program: ids name values uniquely over all calls."""

    function: str
    prefix: str
    node: Node
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        return node_key(self.prefix, self.node)


@dataclass(frozen=True)
class Graph:
    """A captured program.

    `loss` names a scalar value of main; `outputs` are (user's name, value) pairs for evaluation;
    `updates` are (buffer or cache, value) pairs written back after the step; `training` is the mode
    that was captured; `recompute` names what the user's model checkpoints: block calls (by prefix),
    and modules with parts of them that are no block calls. `leaving` are values that later pipeline
    stages read, `boundary` what a stage knows of the others.
    """

    name: str
    functions: tuple[Function, ...]
    main: Function
    inputs: tuple[Input, ...]
    loss: str | None
    outputs: tuple[tuple[str, str], ...] = ()
    updates: tuple[tuple[str, str], ...] = ()
    training: bool = True
    recompute: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    boundary: Boundary | None = None

    @cached_property
    def by_name(self) -> dict[str, Function]:
        return {f.name: f for f in self.functions}

    @property
    def recomputed_calls(self) -> tuple[str, ...]:
        """The block calls that the user's model checkpoints."""
        calls = {item.prefix for item in self.main.body if isinstance(item, Call)}
        return tuple(prefix for prefix in self.recompute if prefix in calls)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Of all values that there are."""
        functions = (self.main, *self.functions)
        return frozenset(spec.dtype for f in functions for spec in f.specs().values())

    @property
    def sample_dims(self) -> dict[str, int]:
        """The dims of samples of what a program of one microbatch has part of; else empty."""
        return {i.target: i.samples for i in self.inputs if i.samples is not None}

    @property
    def ends(self) -> tuple[str, ...]:
        """The values of main that are read outside of it: outputs, updates, the loss, and what
        leaves the stage.
        """
        named = (value for _, value in (*self.outputs, *self.updates))
        return (*named, *self.leaving, *([self.loss] if self.loss else []))

    @property
    def buffer_updates(self) -> tuple[tuple[str, str], ...]:
        """Those of the updates that are of buffers."""
        caches = {entry.target for entry in self.of_kind(CACHE)}
        return tuple(pair for pair in self.updates if pair[0] not in caches)

    def of_kind(self, kind: str) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if i.kind == kind)

    def flat(self) -> Iterator[FlatNode]:
        """Every operator call in execution order; ids of main's values are their names."""
        return iter(self._unfolded[0])

    @property
    def flat_ids(self) -> Mapping[str, str]:
        """The id in `flat` of every value of main; results of calls have their maker's."""
        return self._unfolded[1]

    @cached_property
    def uses(self) -> Mapping[str, list[tuple[FlatNode, int]]]:
        """Who reads a value of `flat`: the operator calls, with the operand that it is."""
        found: dict[str, list[tuple[FlatNode, int]]] = {}
        for flat in self.flat():
            for index, name in enumerate(flat.operands):
                found.setdefault(name, []).append((flat, index))
        return found

    @cached_property
    def _unfolded(self) -> tuple[tuple[FlatNode, ...], Mapping[str, str]]:
        """All operator calls, and the ids of main's values."""
        ids: dict[str, str] = {}
        return tuple(self._visit(ids)), ids

    def _visit(self, ids: dict[str, str]) -> Iterator[FlatNode]:
        count = 0

        def visit(function: Function, prefix: str, ids: dict[str, str]) -> Iterator[FlatNode]:
            nonlocal count
            for item in function.body:
                if isinstance(item, Call):
                    callee = self.by_name[item.function]
                    count += 1
                    scope = f"{count}/"
                    inner = {v.name: scope + v.name for i in callee.body for v in i.results}
                    formal = (v.name for v in callee.inputs)
                    inner |= {f: ids[a] for f, a in zip(formal, item.args, strict=True)}
                    yield from visit(callee, item.prefix, inner)
                    outer = zip(item.results, callee.outputs, strict=True)
                    ids |= {value.name: inner[name] for value, name in outer}
                else:
                    yield FlatNode(
                        function.name,
                        prefix,
                        item,
                        tuple(ids[r] for r in item.refs),
                        tuple(ids[v.name] for v in item.results),
                    )

        body = (v for item in self.main.body for v in item.results)
        ids.update((v.name, v.name) for v in (*self.main.inputs, *body))
        yield from visit(self.main, "", ids)

    def unfolded(self) -> Iterator[tuple[str, Node]]:
        """(decision key, node) of every operator call, in execution order."""
        return ((flat.key, flat.node) for flat in self.flat())


def node_key(prefix: str, node: Node) -> str:
    """The user's name of a node: module path, operator, ordinal."""
    path = ".".join(part for part in (prefix, node.path) if part)
    return f"{path}:{node.op}#{node.index}"


def below(prefix: str, key: str) -> str:
    """A key below a prefix, as plans write it."""
    return f"{prefix}{'.' if prefix and not key.startswith(':') else ''}{key}"


def iter_refs(args: tuple[Arg, ...]) -> Iterator[str]:
    """Names of all values mentioned in `args`, depth first."""
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, tuple):
            yield from iter_refs(arg)


def rename_args(args: tuple[Arg, ...], names: dict[str, str]) -> tuple[Arg, ...]:
    """`args` with values renamed; names not in `names` stay."""

    def visit(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        if isinstance(arg, tuple):
            return tuple(visit(a) for a in arg)
        return arg

    return tuple(visit(a) for a in args)


def with_operands(node: Node, names: tuple[str, ...]) -> Node:
    """The node with its tensor arguments replaced one by one, in the order of `refs`."""
    left = iter(names)

    def visit(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(left))
        return tuple(visit(a) for a in arg) if isinstance(arg, tuple) else arg

    args = tuple(visit(a) for a in node.args)
    return replace(node, args=args, kwargs=tuple((k, visit(v)) for k, v in node.kwargs))


def rename_node(node: Node, names: dict[str, str]) -> Node:
    """A node with its arguments and results renamed."""
    if not any(v.name in names for v in node.results) and not any(n in names for n in node.refs):
        return node
    kwargs = tuple((k, rename_args((v,), names)[0]) for k, v in node.kwargs)
    results = tuple(Value(names.get(v.name, v.name), v.spec) for v in node.results)
    args = rename_args(node.args, names)
    return Node(node.op, args, kwargs, results, node.path, node.index, node.source)


def widened(graph: Graph, to: str = "float64") -> Graph:
    """The graph with every floating dtype below `to`, casts included, replaced by it, and complex
    ones by pairs of it.

    Equality is proved on it: a model that casts to float32 inside is then compared to the gate's
    1e-9, reference and parallel program alike.
    """

    def dtype(name: str) -> str:
        if name == "complex64" and to == "float64":
            return "complex128"
        real = name in ("float32", "bfloat16", "float16", "float8_e4m3fn")
        return to if real and DTYPE_BYTES[name] < DTYPE_BYTES[to] else name

    def value(v: Value) -> Value:
        return Value(v.name, TensorSpec(v.spec.shape, dtype(v.spec.dtype)))

    def arg(a: Arg) -> Arg:
        if isinstance(a, Dtype):
            return Dtype(dtype(a.name))
        return tuple(arg(x) for x in a) if isinstance(a, tuple) else a

    def item(i: Node | Call) -> Node | Call:
        results = tuple(value(v) for v in i.results)
        if isinstance(i, Call):
            return replace(i, results=results)
        kwargs = tuple((k, arg(v)) for k, v in i.kwargs)
        return replace(i, args=tuple(arg(a) for a in i.args), kwargs=kwargs, results=results)

    def function(f: Function) -> Function:
        inputs = tuple(value(v) for v in f.inputs)
        return replace(f, inputs=inputs, body=tuple(item(i) for i in f.body))

    return replace(
        graph,
        functions=tuple(function(f) for f in graph.functions),
        main=function(graph.main),
        inputs=tuple(replace(i, value=value(i.value)) for i in graph.inputs),
    )


def without_gradients(graph: Graph) -> Graph:
    """The graph with no parameter that is trained."""
    return replace(graph, inputs=tuple(replace(i, trainable=False) for i in graph.inputs))


def numbered(body: tuple[Node | Call, ...]) -> tuple[Node | Call, ...]:
    """The body with every node's `index` counted anew over equal (path, op)."""
    seen: dict[tuple[str, str], int] = {}
    result: list[Node | Call] = []
    for item in body:
        if isinstance(item, Node):
            count = seen.get((item.path, item.op), 0)
            seen[item.path, item.op] = count + 1
            if item.index != count:
                item = replace(item, index=count)
        result.append(item)
    return tuple(result)
