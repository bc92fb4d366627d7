"""Mixture of experts: tokens go to the experts that a router chose, and come back weighted.

`parloom.experts` is the whole of it, from tokens to tokens. It always runs as the program of its
parts: `dispatch` makes one row for every (token, slot) whose expert the rank has, sorted by expert
and then by token, so that the rows' dim is expert x token; `grouped_mm` multiplies the rows of each
expert by its matrix; what is computed row by row lies between; `collect` brings rows back to their
tokens. An axis on the experts shards rows and matrices alike, and the result is a partial sum. An
axis on tokens and experts at once is routed: each row travels to the rank that has its expert, and
what is made of it travels back, so that the result lies as the tokens do and is whole.

Rows have no fixed number per expert. What their specs say is the number if all experts get equally
many, which is what work and memory are on average; local code asks the tensors. So no movement
takes rows: they are inside of one operator, whose first and last part send routed rows themselves.

`places` holds, per row, expert x (number of pairs) + pair, with pair = token x slots + slot, in
global indices and ascending.
"""

from collections.abc import Iterator, Mapping
from math import gcd

from parloom.errors import LayoutError
from parloom.ir.graph import Arg, Dtype, Function, Node, Ref, TensorSpec, Value
from parloom.ir.ops.compose import Known, compose, parts_of
from parloom.ir.ops.opdef import Emission, OpDef
from parloom.ir.ops.rule import WHOLE, Rule, Site, broadcast, contraction_flops, no_flops

# Row by row, and written without the number of rows; elementwise operators are so, too.
ROW_OPS = frozenset({
    "slice", "split", "split_with_sizes", "chunk", "cat", "unsqueeze", "squeeze", "select",
    "mean", "sum", "softmax", "transpose", "permute", "t",
})  # fmt: skip
NAME = "parloom.experts"
OF_EXPERTS = frozenset({"parloom.grouped_mm", "parloom.expert_rows"})
STEP = "step_"  # the names of steps' results begin with it: `rows` or `out` are taken
SIGN = "$"  # what a string argument of a step begins with that names a value
GRAIN = 24  # rows per expert are rounded up to what axes of two and three divide


def rows_per_expert(tokens: int, slots: int, experts: int) -> int:
    """Rows that one expert gets if all get equally many, up to 1/16 more where axes then divide."""
    pairs = tokens * slots
    grain = GRAIN
    while grain * 32 * experts <= pairs:
        grain *= 2
    step = gcd(tokens, grain)
    even, rest = divmod(pairs, experts)
    fits = not rest and gcd(tokens, even) % step == 0
    return even if fits else -(-pairs // (experts * step)) * step


def _row_factors(site: Site, tokens: int, rows: int, experts: int) -> dict[str, int]:
    """Sizes: rows are (e, t0, c) and tokens (t0, t1)."""
    if rows % experts:
        raise LayoutError(f"{site.node.key}: {rows} rows do not divide over {experts} experts")
    each = rows // experts
    chunks = gcd(tokens, each)
    return {"e": experts, "t0": chunks, "t1": tokens // chunks, "c": each // chunks}


def _rule(
    sizes: Mapping[str, int],
    operands: list[list[str]],
    results: list[list[str]],
    whole: tuple[str, ...],
    route: tuple[str, str] | None = None,
) -> Rule:
    """A rule from dims like `e t0 c`; factors of size 1 are left out."""

    def dims(tensor: list[str]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f for f in dim.split() if sizes[f] > 1) for dim in tensor)

    return Rule(
        tuple((f, n) for f, n in sizes.items() if n > 1),
        tuple(dims(t) for t in operands),
        tuple(dims(t) for t in results),
        tuple((f, WHOLE) for f in whole if sizes[f] > 1),
        routes=(route,) if route and all(sizes[f] > 1 for f in route) else (),
    )


def _dispatch_rule(site: Site) -> Rule:
    """tokens[t, h] ids[t, s] experts[e] -> rows[e t, h] places[e t]."""
    (tokens, width), slots = site.operands[0].shape, site.operands[1].shape[1]
    sizes = _row_factors(site, tokens, site.results[0].shape[0], site.operands[2].shape[0])
    sizes |= {"s": slots, "h": width}
    operands = [["t0 t1", "h"], ["t0 t1", "s"], ["e"]]
    results = [["e t0 c", "h"], ["e t0 c"]]
    return _rule(sizes, operands, results, ("t1", "c", "s", "h"), ("t0", "e"))


def _dispatch(e: Emission) -> str:
    digits = e.operand_digits(0)
    if axes := e.rule.routed(e.assignment, e.mesh):
        experts = e.operand_digits(0, 2)
        return f"rt.route({e.arg(0)}, {e.arg(1)}, ctx, {digits}, {experts}, {axes!r})"
    total = e.site.operands[2].shape[0]
    return f"rt.dispatch({e.arg(0)}, {e.arg(1)}, {e.arg(2)}, {total}, ctx, {digits})"


def _collect_rule(site: Site) -> Rule:
    """rows[e t, o] places[e t] weights[t, s] ids[t, s] experts[e] -> [t, o]."""
    (rows, width), (tokens, slots) = site.operands[0].shape, site.operands[2].shape
    sizes = _row_factors(site, tokens, rows, site.operands[4].shape[0])
    sizes |= {"s": slots, "o": width}
    operands = [["e t0 c", "o"], ["e t0 c"], ["t0 t1", "s"], ["t0 t1", "s"], ["e"]]
    return _rule(sizes, operands, [["t0 t1", "o"]], ("t1", "c", "s"), ("e", "t0"))


def _collect(e: Emission) -> str:
    rows, digits = ", ".join(e.arg(i) for i in range(3)), e.operand_digits(0, 2)
    if axes := e.rule.routed(e.assignment, e.mesh):
        experts = e.operand_digits(0, 4)
        return f"rt.unroute({rows}, {e.arg(3)}, ctx, {digits}, {experts}, {axes!r})"
    return f"rt.collect({rows}, ctx, {digits})"


def _grouped_rule(site: Site) -> Rule:
    """rows[e c, k] matrices[e, k, n] places[e c] experts[e] -> [e c, n]."""
    rows, (experts, k, n) = site.operands[0].shape[0], site.operands[1].shape
    sizes = {"e": experts, "c": rows // experts, "k": k, "n": n}
    return _rule(sizes, [["e c", "k"], ["e", "k", "n"], ["e c"], ["e"]], [["e c", "n"]], ())


def _expert_rows_rule(site: Site) -> Rule:
    """table[e, n] places[e c] experts[e] -> [e c, n]."""
    (experts, n), rows = site.operands[0].shape, site.operands[1].shape[0]
    sizes = {"e": experts, "c": rows // experts, "n": n}
    return _rule(sizes, [["e", "n"], ["e c"], ["e"]], [["e c", "n"]], ())


OPS: tuple[OpDef, ...] = (
    OpDef("parloom.dispatch", _dispatch_rule, _dispatch, no_flops, saved=(("result", 1),)),
    OpDef("parloom.grouped_mm", _grouped_rule, "rt.grouped_mm", contraction_flops, 2.0,
          (("operand", 0), ("operand", 1))),
    OpDef("parloom.expert_rows", _expert_rows_rule, "rt.expert_rows", no_flops,
          saved=(("operand", 1),)),
    OpDef("parloom.collect", _collect_rule, _collect,
          saved=(("operand", 0), ("operand", 1), ("operand", 2)), linear="carried"),
)  # fmt: skip


def is_row_op(op: str, known: Known) -> bool:
    """Whether an operator may stand between dispatch and collect."""
    entry = known.get(op)
    if entry is None or entry.random:
        return False
    return op in ROW_OPS or (entry.rule is broadcast and not entry.view)  # a view says its shape


def program_of(site: Site, known: Known) -> Function:
    """The parts of a `parloom.experts(tokens, ids, weights, experts, tensors, steps)`.

    A step is (operator, arguments, keyword arguments, results); results are (name, dtype, shape) as
    captured, where rows are all pairs. `$rows`, `$0` (the first of `tensors`) and `$name` are
    values. Matrices and tables of experts are told by their operator, `grouped_mm(rows, matrices)`
    and `expert_rows(table)`; the rest is added here.

    Raises: LayoutError for steps that are none; they may come from a file.
    """
    node = site.node
    tensors, steps = node.args[4], node.args[5]
    if not isinstance(tensors, tuple) or not isinstance(steps, tuple) or not steps:
        raise LayoutError(f"{node.key}: needs a tuple of tensors and one of steps")
    names = ("tokens", "ids", "weights", "experts", *(f"w{i}" for i in range(len(tensors))))
    inputs = tuple(Value(n, s) for n, s in zip(names, site.operands, strict=True))
    tokens, ids = site.operands[0], site.operands[1]
    experts = site.operands[3].shape[0]
    pairs = ids.num_elements
    rows = experts * rows_per_expert(ids.shape[0], ids.shape[1], experts)
    made = (
        Value("rows", TensorSpec((rows, tokens.shape[1]), tokens.dtype)),
        Value("places", TensorSpec((rows,), "int64")),
    )
    refs = (Ref("tokens"), Ref("ids"), Ref("experts"))
    body = [Node("parloom.dispatch", refs, (), made, node.path, 0)]
    values = {f"{SIGN}{i}": f"w{i}" for i in range(len(tensors))} | {f"{SIGN}rows": "rows"}
    by_row = {"rows"}
    for index, step in enumerate(steps):
        inner = _step(node, step, values, by_row, (pairs, rows), known)
        values |= {f"{SIGN}{v.name.removeprefix(STEP)}": v.name for v in inner.results}
        body.append(Node(inner.op, inner.args, inner.kwargs, inner.results, node.path, index))
    last = Ref(body[-1].results[0].name)
    args = (last, Ref("places"), Ref("weights"), Ref("ids"), Ref("experts"))
    out = Value("out", site.results[0])
    body.append(Node("parloom.collect", args, (), (out,), node.path, 0))
    return Function("experts", inputs, tuple(body), ("out",))


def _step(
    node: Node,
    step: Arg,
    values: Mapping[str, str],
    by_row: set[str],
    rows: tuple[int, int],
    known: Known,
) -> Node:
    """A step as a node; `rows` are the number of pairs as captured and of rows on average."""
    match step:
        case (str(op), tuple(args), tuple(kwargs), tuple(results)) if op in OF_EXPERTS or is_row_op(
            op, known
        ):
            pass
        case _:
            raise LayoutError(f"{node.key}: {step!r} is no step of experts")
    refs = [*_values(args, values)]
    made = []
    inside = op in OF_EXPERTS or bool(by_row.intersection(refs))
    for captured, dtype, shape in _specs(node, results):
        name = STEP + captured
        if inside:
            shape = (rows[1], *shape[1:])
            by_row.add(name)
        made.append(Value(name, TensorSpec(shape, dtype)))
    given = tuple(_argument(a, values) for a in args)
    if op in OF_EXPERTS:
        given = (*given, Ref("places"), Ref("experts"), rows[0])
    named = tuple((k, _argument(v, values)) for k, v in _pairs(node, kwargs))
    return Node(op, given, named, tuple(made))


def _values(arg: Arg, values: Mapping[str, str]) -> Iterator[str]:
    if isinstance(arg, tuple):
        for inner in arg:
            yield from _values(inner, values)
    elif isinstance(arg, str) and arg in values:
        yield values[arg]


def _argument(arg: Arg, values: Mapping[str, str]) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_argument(a, values) for a in arg)
    return Ref(values[arg]) if isinstance(arg, str) and arg in values else arg


def _specs(node: Node, results: tuple[Arg, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for result in results:
        match result:
            case (str(name), Dtype(dtype), tuple(shape)):
                yield name, dtype, tuple(n for n in shape if isinstance(n, int))
            case _:
                raise LayoutError(f"{node.key}: {result!r} is no result of a step")


def _pairs(node: Node, kwargs: tuple[Arg, ...]) -> Iterator[tuple[str, Arg]]:
    for pair in kwargs:
        match pair:
            case (str(name), value):
                yield name, value
            case _:
                raise LayoutError(f"{node.key}: {pair!r} is no keyword argument of a step")


def made_of(known: Known) -> OpDef:
    """The entry of `parloom.experts`, over the entries that its parts may be."""

    def rule(site: Site) -> Rule:
        return compose(program_of(site, known), known)

    def flops(site: Site, rule: Rule) -> float:
        parts = parts_of(program_of(site, known), known)
        return sum(known[node.op].flops(inner, cut) for node, inner, cut in parts)

    def expand(site: Site, sharded: frozenset[str]) -> Function:
        return program_of(site, known)

    return OpDef(NAME, rule, "", flops, 2.0, expand=expand)
