"""Mixture of experts, below how model libraries write it.

A router gives every token the experts of its slots. What follows is written in two ways: pairs of
token and slot are sorted by expert, multiplied group by group and put back in order; or each pair
multiplies with a copy of its expert's matrix. Either way a sum over slots of weighted rows comes
out, or sorted rows are added where their tokens are. From there the dataflow is followed back: what
every value on the way means is read off the operators, never off names. If all of it is understood,
one `parloom.experts` takes its place, which can be split over experts, tokens and inner widths.
Otherwise everything stays as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from parloom.ir.graph import Arg, Dtype, Graph, Node, Ref, TensorSpec, Value, numbered
from parloom.ir.ops import OPS
from parloom.ir.ops.experts import NAME, SIGN, is_row_op
from parloom.ir.ops.rule import Site
from parloom.ir.simplify import nodes_of, without_dead_nodes

# What a value means: the EXPERT of every pair, the same SORTED, the ORDER that sorts, its INVERSE,
# the TOKEN of every sorted pair, how many pairs each expert has (COUNTS) and all up to it have
# (ENDS), the WEIGHT of every pair, ROWS of pairs, and WEIGHTED rows.
EXPERT, SORTED, ORDER, INVERSE, TOKEN, COUNTS, ENDS, WEIGHT, ROWS, WEIGHTED = (
    "expert", "sorted", "order", "inverse", "token", "counts", "ends", "weight", "rows", "weighted",
)  # fmt: skip
EXACT = frozenset({"int64", "int32", "float64", "float32"})  # dtypes that keep an expert's number
GROUPED = frozenset({"transformers.grouped_mm_fallback", "_grouped_mm"})
ON_MATRICES = frozenset({"transpose", "permute", "_to_copy"})


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a value means; `sorted` where its pairs are in the order of their experts."""

    kind: str
    sorted: bool = False


def with_experts(graph: Graph) -> Graph:
    """The flat graph with every recognised mixture of experts as one node."""
    flow = Flow(graph)
    body: list[Node] = []
    for node in flow.nodes:
        body += Mixture(flow, node).written() if node.op in ("sum", "index_add") else [node]
    if len(body) == len(flow.nodes):
        return graph
    main = replace(graph.main, body=numbered(tuple(body)))
    return without_dead_nodes(replace(graph, main=main))


class Flow:
    """Who makes and who reads each value of a flat graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = tuple(nodes_of(graph))
        self.specs = graph.main.specs()
        self.returned = frozenset(graph.main.outputs)
        self.maker = {v.name: node for node in self.nodes for v in node.results}
        self.readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.refs):
                self.readers.setdefault(name, []).append(node)


class Mixture:
    """A sum of weighted rows, read back to tokens, the router's choice and the experts' tensors."""

    def __init__(self, flow: Flow, last: Node) -> None:
        self.flow, self.last = flow, last
        self.known: dict[str, Meaning | None] = {}
        self.parts: dict[str, str | int] = {}
        self.between: set[int] = set()  # nodes that take rows apart before a product
        self.tokens = self.slots = self.pairs = 0

    def written(self) -> list[Node]:
        """The nodes that take the sum's place: itself where it is something else."""
        if not self.understood():
            return [self.last]
        return Steps(self).nodes()

    def understood(self) -> bool:
        """Whether everything behind the sum is known, and no row is read from elsewhere."""
        last = self.summed() if self.last.op == "sum" else self.added()
        if last is None:
            return False
        inside = {id(self.flow.maker[n]) for n, m in self.known.items() if m}
        inside |= {id(last), *self.between}
        rows = [n for n, m in self.known.items() if m and m.kind in (ROWS, WEIGHTED)]
        elsewhere = (
            name in self.flow.returned or any(id(r) not in inside for r in self.flow.readers[name])
            for name in rows
        )
        wanted = {"ids", "weights", "tokens", "experts"}
        return wanted <= self.parts.keys() and not any(elsewhere)

    def summed(self) -> Node | None:
        """What reads the weighted rows, if this is their sum over the slots of each token."""
        match self.last.args:
            case (Ref(name), (1,)) if not self.last.kwargs:
                made = self.flow.maker.get(name)
            case _:
                return None
        if made is None or made.op != "view" or len(self.shape(name)) != 3:
            return None
        self.tokens, self.slots, width = self.shape(name)
        self.pairs = self.tokens * self.slots
        back = made.refs[0]
        if self.pairs < 2 or self.shape(back) != (self.pairs, width):
            return None
        return made if self.meaning(back) == Meaning(WEIGHTED) else None

    def added(self) -> Node | None:
        """The same where sorted rows are added to zeros at the places of their tokens."""
        match self.last.args:
            case (Ref(zeros), 0, Ref(at), Ref(rows)) if not self.last.kwargs:
                made = self.flow.maker.get(zeros)
            case _:
                return None
        if made is None or made.op != "zeros" or len(self.shape(zeros)) != 2:
            return None
        self.tokens, self.pairs = self.shape(zeros)[0], self.shape(rows)[0]
        self.slots = self.pairs // max(self.tokens, 1)
        if self.pairs < 2 or self.pairs != self.tokens * self.slots:
            return None
        known = (self.meaning(at), self.meaning(rows))
        return self.last if known == (Meaning(TOKEN, True), Meaning(WEIGHTED, True)) else None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.flow.specs[name].shape

    def same(self, part: str, value: str | int) -> bool:
        """Whether `part` is `value` wherever it is mentioned."""
        return self.parts.setdefault(part, value) == value

    def meaning(self, name: Arg) -> Meaning | None:
        """What a value means; None for what comes from outside."""
        if isinstance(name, Ref):
            name = name.name
        if not isinstance(name, str) or name not in self.flow.maker:
            return None
        if name not in self.known:
            self.known[name] = None  # until it is known
            node = self.flow.maker[name]
            found = READERS[node.op](self, node, name) if node.op in READERS else None
            self.known[name] = found or _row_by_row(self, node)
        return self.known[name]

    def is_kind(self, arg: Arg, *kinds: str) -> bool:
        found = self.meaning(arg)
        return found is not None and found.kind in kinds

    def expert_tensor(self, arg: Arg, rank: int) -> bool:
        """Whether an argument has a slice per expert."""
        shape = self.shape(arg.name) if isinstance(arg, Ref) else ()
        return len(shape) == rank and self.same("experts", shape[0])

    def product(self, node: Node) -> tuple[Arg, Arg, bool] | None:
        """(rows, matrices, whether to transpose them) of a product that takes rows apart."""
        if node.op in GROUPED:
            rest = (*node.args[3:], *(v for _, v in node.kwargs))
            rows, matrices = node.args[:2]
            return None if any(a is not None for a in rest) else (rows, matrices, False)
        made = self.flow.maker.get(node.refs[0]) if node.refs else None
        if node.op != "squeeze" or made is None or made.op != "bmm":
            return None
        makers = [self.flow.maker.get(name) for name in made.refs]
        for (row, copy), dim, transposed in ((makers[::-1], -1, True), (makers, 1, False)):
            if row is None or copy is None or (row.op, copy.op) != ("unsqueeze", "index"):
                continue
            at = {d % 3 for d in (row.args[1], node.args[1]) if isinstance(d, int)}
            if at == {dim % 3}:
                return row.args[0], copy.args[0], transposed
        return None


Reader = Callable[[Mixture, Node, str], Meaning | None]


def _view(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    """Pairs from [token, slot], or a row of its token for every pair."""
    source = node.refs[0]
    if len(mixture.shape(name)) == 2:
        return _repeated(mixture, mixture.flow.maker.get(source))
    given = mixture.shape(source)
    if given[-1:] != (mixture.slots,) or prod(given) != mixture.pairs or len(given) < 2:
        return None
    if mixture.shape(name) != (mixture.pairs,):
        return None
    if mixture.flow.specs[name].is_float:
        return Meaning(WEIGHT) if mixture.same("weights", source) else None
    return Meaning(EXPERT) if mixture.same("ids", source) else None


def _repeated(mixture: Mixture, node: Node | None) -> Meaning | None:
    """[token, 1, width], expanded over the slots."""
    made = mixture.flow.maker.get(node.refs[0]) if node is not None else None
    if node is None or made is None or (node.op, made.op) != ("expand", "unsqueeze"):
        return None
    tokens, shape = made.refs[0], mixture.shape(made.refs[0])
    between = (mixture.tokens, mixture.slots, *shape[1:])
    fits = len(shape) == 2 and made.args[1] == 1 and mixture.shape(node.results[0].name) == between
    return Meaning(ROWS) if fits and mixture.same("tokens", tokens) else None


def _sort(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    """Ascending and along the only dim; also the second sort, which inverts the first."""
    plain = all(a in (0, -1, False) for a in node.args[1:])
    if not plain or node.kwarg("descending", False) or len(mixture.shape(node.refs[0])) != 1:
        return None
    index = node.op == "argsort" or name == node.results[1].name
    if mixture.is_kind(node.args[0], EXPERT):
        return Meaning(ORDER if index else SORTED, sorted=True)
    return Meaning(INVERSE) if index and mixture.is_kind(node.args[0], ORDER) else None


def _divided(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    floor = node.op == "floor_divide" or node.kwarg("rounding_mode") in ("floor", "trunc")
    if floor and node.args[1] == mixture.slots and mixture.is_kind(node.args[0], ORDER):
        return Meaning(TOKEN, sorted=True)
    return None


def _indexed(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    """Rows of tokens, weights in order, a table's rows, rows back in place."""
    source, at = node.args[:2]
    if not isinstance(source, Ref) or not isinstance(at, tuple) or len(at) != 1:
        return None
    index, shape = mixture.meaning(at[0]), mixture.shape(source.name)
    if index is None:
        return None
    if index.kind == TOKEN and len(shape) == 2 and shape[0] == mixture.tokens:
        return Meaning(ROWS, sorted=True) if mixture.same("tokens", source.name) else None
    if index.kind in (EXPERT, SORTED) and mixture.expert_tensor(source, 2):
        return Meaning(ROWS, index.sorted)
    found = mixture.meaning(source)
    if index.kind == ORDER and found == Meaning(WEIGHT):
        return Meaning(WEIGHT, sorted=True)
    if index.kind == INVERSE and found in (Meaning(ROWS, True), Meaning(WEIGHTED, True)):
        return Meaning(found.kind)
    return None


def _cast(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    exact = mixture.flow.specs[name].dtype in EXACT
    found = mixture.meaning(node.args[0])
    return found if exact and found and found.kind in (EXPERT, SORTED, COUNTS, ENDS) else None


def _counts(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    count = mixture.shape(name)[0]
    bins = (count, 0, count - 1)
    if node.args[1:] != bins or not mixture.is_kind(node.args[0], EXPERT, SORTED):
        return None
    return Meaning(COUNTS) if mixture.same("experts", count) else None


def _ends(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    return Meaning(ENDS) if mixture.is_kind(node.args[0], COUNTS) else None


def _inverse(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    """0, 1, 2, ... written to the places that the order says."""
    if node.op == "index_put":
        match node.args:
            case (Ref(), (order,), Ref(values)):
                pass
            case _:
                return None
    else:
        match node.args:
            case (Ref(), 0 | -1, order, Ref(values)):
                pass
            case _:
                return None
    numbers = mixture.flow.maker.get(values)
    counted = numbers is not None and numbers.op == "arange" and numbers.args in (
        (mixture.pairs,), (0, mixture.pairs),
    )  # fmt: skip
    whole = mixture.shape(name) == (mixture.pairs,)
    return Meaning(INVERSE) if counted and whole and mixture.is_kind(order, ORDER) else None


def _column(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    found = mixture.meaning(node.args[0])
    column = mixture.shape(name) == (mixture.pairs, 1)
    return found if column and found and found.kind == WEIGHT else None


def _weighted(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    found = sorted((mixture.meaning(a) or Meaning("")).kind for a in node.args)
    flags = {m.sorted for a in node.args if (m := mixture.meaning(a))}
    columns = [a for a in node.refs if mixture.is_kind(a, WEIGHT)]
    if found != [ROWS, WEIGHT] or len(flags) > 1:
        return None
    one = mixture.shape(columns[0]) == (mixture.pairs, 1)
    return Meaning(WEIGHTED, flags.pop()) if one and len(mixture.shape(name)) == 2 else None


def _product(mixture: Mixture, node: Node, name: str) -> Meaning | None:
    """Every row times its expert's matrix: by groups of sorted rows, or with copies of matrices."""
    found = mixture.product(node)
    if found is None or not mixture.expert_tensor(found[1], 3):
        return None
    rows = mixture.meaning(found[0])
    if rows is None or rows.kind != ROWS:
        return None
    if node.op in GROUPED:
        return rows if rows.sorted and mixture.is_kind(node.args[2], ENDS) else None
    copy, row = sorted(
        (mixture.flow.maker[name] for name in mixture.flow.maker[node.refs[0]].refs),
        key=lambda made: made.op,
    )
    mixture.between.add(id(row))
    at = copy.args[1]
    expert = mixture.meaning(at[0]) if isinstance(at, tuple) and len(at) == 1 else None
    fits = expert == Meaning(SORTED if rows.sorted else EXPERT, rows.sorted)
    return rows if fits else None


def _row_by_row(mixture: Mixture, node: Node) -> Meaning | None:
    """What an operator that treats every row alike makes of rows."""
    if not is_row_op(node.op, OPS):
        return None
    names = [n for n in node.refs if mixture.shape(n)[:1] == (mixture.pairs,)]
    found = {mixture.meaning(n) for n in names}
    if len(found) != 1 or found not in ({Meaning(ROWS)}, {Meaning(ROWS, True)}):
        return None
    rule = OPS[node.op].rule(Site(node, tuple(mixture.flow.specs[n] for n in node.refs)))
    lead = {
        *(dims[0] for n, dims in zip(node.refs, rule.operands, strict=True) if n in names),
        *(dims[0] if dims else () for dims in rule.results),
    }
    if len(lead) != 1 or len(row := lead.pop()) != 1 or rule.kind(row[0]) != "plain":
        return None
    others = (d for n, d in zip(node.refs, rule.operands, strict=True) if n not in names)
    return None if any(row[0] in dim for dims in others for dim in dims) else found.pop()


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "view": _view, "sort": _sort, "argsort": _sort, "floor_divide": _divided, "div": _divided,
        "index": _indexed, "_to_copy": _cast, "histc": _counts,
        "cumsum": _ends, "index_put": _inverse, "scatter": _inverse, "unsqueeze": _column,
        "mul": _weighted, "squeeze": _product,
        **dict.fromkeys(GROUPED, _product),
    }
)  # fmt: skip


class Steps:
    """The understood rows of a mixture, written as the steps of a `parloom.experts`."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture, self.flow = mixture, mixture.flow
        self.tensors: dict[str, str] = {}  # value from outside -> its number
        self.values: dict[str, str] = {}
        self.steps: list[Arg] = []
        self.taken: set[str] = set()

    def nodes(self) -> list[Node]:
        """The table of experts, and the operator."""
        mixture, last = self.mixture, self.mixture.last
        known = mixture.known
        for node in self.flow.nodes:
            if any(known.get(v.name) and known[v.name].kind == ROWS for v in node.results):  # type: ignore[union-attr]
                self.step(node)
        lead: list[Node] = []
        count = mixture.parts["experts"]
        assert isinstance(count, int)
        spec = TensorSpec((count,), "int64")
        experts = Value(f"{last.results[0].name}.experts", spec)
        kwargs = (("dtype", Dtype("int64")),)
        lead.append(Node("arange", (count,), kwargs, (experts,), last.path, 0, last.source))
        pairs = [self.table(part, lead) for part in ("ids", "weights")]
        tokens = Ref(str(mixture.parts["tokens"]))
        tensors = tuple(Ref(name) for name in self.tensors)
        args: tuple[Arg, ...] = (tokens, *pairs, Ref(experts.name), tensors, tuple(self.steps))
        return [*lead, replace(last, op=NAME, args=args)]

    def table(self, part: str, lead: list[Node]) -> Ref:
        """A part as [token, slot]."""
        name = str(self.mixture.parts[part])
        shape = (self.mixture.tokens, self.mixture.slots)
        if self.mixture.shape(name) == shape:
            return Ref(name)
        last = self.mixture.last
        made = Value(
            f"{last.results[0].name}.{part}", TensorSpec(shape, self.flow.specs[name].dtype)
        )
        lead.append(Node("view", (Ref(name), shape), (), (made,), last.path, 0, last.source))
        return Ref(made.name)

    def step(self, node: Node) -> None:
        """Write a node that makes rows."""
        name = node.results[0].name
        source = node.refs[0]
        product = self.mixture.product(node)
        if product is not None:
            rows, matrices, transposed = product
            given = (self.argument(rows), self.matrices(matrices, transposed))
            self.add("parloom.grouped_mm", given, (), node.results)
        elif node.op == "view" or self.reads(node, TOKEN):
            self.values[name] = f"{SIGN}rows"
        elif self.reads(node, INVERSE):
            self.values[name] = self.values[source]
        elif self.reads(node, EXPERT, SORTED):
            self.add("parloom.expert_rows", (self.argument(Ref(source)),), (), node.results)
        else:
            kwargs = tuple((k, self.argument(v)) for k, v in node.kwargs)
            self.add(node.op, tuple(self.argument(a) for a in node.args), kwargs, node.results)

    def reads(self, node: Node, *kinds: str) -> bool:
        """Whether a node indexes by a value of one of these kinds."""
        return node.op == "index" and self.mixture.is_kind(Ref(node.refs[1]), *kinds)

    def matrices(self, arg: Arg, transposed: bool) -> Arg:
        """The matrices of a product, with the views and casts that lead to them."""
        assert isinstance(arg, Ref)
        made = self.flow.maker.get(arg.name)
        alone = len(self.flow.readers[arg.name]) == 1
        if made is not None and made.op in ON_MATRICES and alone and len(made.refs) == 1:
            self.matrices(made.args[0], False)
            args = tuple(self.argument(a) for a in made.args)
            if arg.name not in self.values:
                self.add(made.op, args, made.kwargs, made.results)
        found = self.argument(arg)
        if not transposed:
            return found
        spec = self.flow.specs[arg.name]
        turned = TensorSpec((spec.shape[0], spec.shape[2], spec.shape[1]), spec.dtype)
        made_name = f"{arg.name}.transposed"
        self.add("transpose", (found, 1, 2), (), (Value(made_name, turned),))
        return self.values[made_name]

    def add(
        self, op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...],
        results: tuple[Value, ...],
    ) -> None:  # fmt: skip
        """Append a step; its results are named by the operator."""
        stem = op.rsplit(".", 1)[-1].strip("_")
        named: list[Arg] = []
        for value in results:
            names = (stem, *(f"{stem}_{i}" for i in range(2, len(self.taken) + 3)))
            name = next(n for n in names if n not in self.taken)
            self.taken.add(name)
            self.values[value.name] = f"{SIGN}{name}"
            named.append((name, Dtype(value.spec.dtype), value.spec.shape))
        self.steps.append((op, args, kwargs, tuple(named)))

    def argument(self, arg: Arg) -> Arg:
        """An argument with values named as steps name them."""
        if isinstance(arg, tuple):
            return tuple(self.argument(a) for a in arg)
        if not isinstance(arg, Ref):
            return arg
        if arg.name not in self.values:
            self.values[arg.name] = self.tensors.setdefault(arg.name, f"{SIGN}{len(self.tensors)}")
        return self.values[arg.name]
