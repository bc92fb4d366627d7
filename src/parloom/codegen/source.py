"""Plan -> source: one readable Python module that every rank runs.

One function per lowered block, one `forward`, and the tables that the runtime needs (mesh,
parameters, units). Statements stand in the user's order under comments with the user's module path;
each one says the layout of what it makes. Nothing is dispatched: operators are plain torch calls on
local tensors, movements are calls of `parloom.runtime` that name their adjoint.
"""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

from parloom.codegen.tables import tables
from parloom.errors import VerifyError
from parloom.ir.graph import Dtype, Input, Node
from parloom.ir.layout import describe
from parloom.ir.mesh import Mesh
from parloom.ir.moves import ADJOINTS
from parloom.ir.ops import Emission, Site, is_operator, op_of
from parloom.ir.ops.opdef import literal
from parloom.ir.pcg import (
    PCG,
    TIME,
    Compute,
    Item,
    Movement,
    PCall,
    PFunction,
    PValue,
    Remake,
    operands_of,
    results_of,
)
from parloom.ir.step_program import block_weights

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
WIDTH = 100
# What generated programs mean by these names, no value or function may change.
TAKEN = frozenset({"torch", "F", "Tensor", "rt", "ctx", "prefix", "batch", "hoisted", "float"})
TAKEN |= {"forward", "prologue", "tuple", "dict", "str", "MESH", "PROGRAM"}


def generate(pcg: PCG, title: str) -> str:
    """The source of the program; `title` becomes the module's docstring."""
    weights = _Weights(pcg)
    parts = [_header(title, pcg)]
    for function in pcg.functions:
        parts.append(_function(pcg, function, weights))
        if function.remake is not None:
            parts.append(_remake(pcg, function, function.remake, weights))
    if pcg.prologue:
        parts.append(_prologue(pcg))
    parts.append(_forward(pcg, weights))
    parts.append(tables(pcg))
    return "\n\n\n".join(parts) + "\n"


LEGEND = """\
Layouts in comments, per dim: `2/data·4` is a dim of 8, of which `data` owns the outer digit of 2
and 4 are local; a bare number is whole on every rank; `partial(a)` are addends of a sum over `a`.
Moves name what their backward pass does: `rt.replicate` sends nothing forward. `rt.mask(x, ctx,
axes)` is x on the first rank along `axes` and zero on the others: what must enter a sum once."""


def _legend(pcg: PCG) -> str:
    """Where the ranks are, and how to read comments and moves; nothing for a single rank."""
    if pcg.mesh.num_ranks == 1:
        return ""
    places = []
    for axis in pcg.mesh.axes:
        terms, rest = [], axis.size
        for prime in axis.primes:
            rest //= prime.size
            digit = f"rank // {prime.stride} % {prime.size}" if prime.stride > 1 else (
                f"rank % {prime.size}")  # fmt: skip
            terms.append(f"{rest} * ({digit})" if rest > 1 else digit)
        if terms:
            places.append(f"{axis.name} = {' + '.join(terms)}")
    return f"\n\nRanks: {', '.join(places)}.\n{LEGEND}\n"


def _header(title: str, pcg: PCG) -> str:
    lines = (printable(line) for line in (title.rstrip() + _legend(pcg)).split("\n"))
    clean = "\n".join(lines).replace("\\", "/").replace('"', "'")
    return (
        f'"""{clean}"""\n\n'
        "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor\n\n"
        "from parloom import runtime as rt"
    )


def identifier(name: str) -> str:
    """`name`, refused unless it is an identifier of its own: names come from files."""
    if not IDENTIFIER.match(name) or keyword.iskeyword(name):
        raise VerifyError(f"{name!r} is no identifier")
    if name in TAKEN:
        raise VerifyError(f"the name {name!r} is taken by the program itself")
    return name


def printable(text: str) -> str:
    """`text` on one line: whatever is not printable becomes `?`."""
    return "".join(c if c.isprintable() else "?" for c in text)


def comment(text: str) -> str:
    """The one way in which text becomes a comment: it cannot end its line."""
    return f"# {printable(text)}"


def _tuple(values: Iterable[PValue]) -> str:
    return ", ".join(identifier(v.name) for v in values)


class _Weights:
    """Which formal inputs of each lowered function are gathered weights of the call's own unit."""

    def __init__(self, pcg: PCG) -> None:
        self.targets = {p.input.value.name: p.input.target for p in pcg.parameters}
        self.formal = block_weights(pcg)

    def split(self, call: PCall) -> tuple[tuple[PValue, ...], tuple[PValue, ...]]:
        """(inputs, weights of the call's unit)."""
        flags = self.formal[call.function]
        inputs = tuple(a for a, f in zip(call.args, flags, strict=True) if not f)
        return inputs, tuple(a for a, f in zip(call.args, flags, strict=True) if f)

    def formals(self, function: PFunction) -> tuple[tuple[PValue, ...], tuple[PValue, ...]]:
        """(inputs, weights of the call's unit) as the function names them."""
        flags = tuple(zip(function.inputs, self.formal[function.name], strict=True))
        return tuple(v for v, f in flags if not f), tuple(v for v, f in flags if f)

    def read_again(self, function: PFunction, remake: Remake) -> tuple[PValue, ...]:
        """What is made again is made of these, beside the weights of the call's unit."""
        own = {value.name for value in self.formals(function)[1]}
        return tuple(value for value in remake.inputs if value.name not in own)


def _function(pcg: PCG, function: PFunction, weights: _Weights) -> str:
    inputs, own = weights.formals(function)
    count = len(function.outputs)
    returns = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    values = _tuple(function.outputs)
    kept = {v.name for v in function.outputs}
    if function.remake is not None:
        returns, read = "rt.Made", weights.read_again(function, function.remake)
        results = values if count == 1 else f"({values})"
        dropped = function.remake.outputs
        values = f"rt.Made({results}, kept={_group(read)}, dropped={_group(dropped)})"
        kept |= {v.name for v in (*read, *dropped)}
    lines = [_head(function.name, (*inputs, *own), returns)]
    lines += _layout_lines(pcg.mesh, (*inputs, *own))
    parts = _parts(function)
    lines += _statements(pcg, function.body, kept, prefix=None, weights=weights, parts=parts)
    lines.append(f"    return {values}")
    return "\n".join(lines)


def _remake(pcg: PCG, function: PFunction, remake: Remake, weights: _Weights) -> str:
    """The function that makes again what `function` drops."""
    _, own = weights.formals(function)
    arguments = (*weights.read_again(function, remake), *own)
    lines = [_head(remake.name, arguments, "tuple[Tensor, ...]")]
    kept = {v.name for v in remake.outputs}
    parts = _parts(function)
    lines += _statements(pcg, remake.body, kept, prefix=None, weights=weights, parts=parts)
    lines.append(f"    return {_group(remake.outputs)}")
    return "\n".join(lines)


def _parts(function: PFunction) -> dict[str, int]:
    """The runs of items of a function that are made again, by the first value of each item."""
    again = () if function.remake is None else function.remake.body
    names = {results_of(item)[0].name for item in again}
    parts: dict[str, int] = {}
    number, inside = -1, False
    for item in function.body:
        name = results_of(item)[0].name
        number += name in names and not inside
        inside = name in names
        if inside:
            parts[name] = number
    return parts


def _head(name: str, arguments: Iterable[PValue], returns: str) -> str:
    typed = ", ".join(f"{identifier(v.name)}: Tensor" for v in arguments)
    typed = f", {typed}" if typed else ""
    head = f"def {identifier(name)}(ctx: rt.Context, prefix: str{typed}) -> {returns}:"
    return head if len(head) <= WIDTH else _wrapped(head)


def _group(values: Sequence[PValue]) -> str:
    """A tuple of values, of any length."""
    return f"({_tuple(values)}{',' if len(values) == 1 else ''})"


def _wrapped(head: str) -> str:
    opening, rest = head.split("(", 1)
    arguments, closing = rest.rsplit(")", 1)
    lines, line = [f"{opening}("], "   "
    for argument in re.split(r", (?=\w+: )", arguments):
        if len(line) + len(argument) + 2 > WIDTH:
            lines.append(line)
            line = "   "
        line += f" {argument},"
    return "\n".join([*lines, line, f"){closing}"])


def _layout_lines(mesh: Mesh, values: Iterable[PValue]) -> Iterator[str]:
    if mesh.num_ranks > 1:
        for value in values:
            layout = describe(value.layout, value.spec.shape, mesh)
            yield f"    {comment(f'{value.name}: {layout}')}"


def _prologue(pcg: PCG) -> str:
    lines = [
        "def prologue(ctx: rt.Context, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:",
        '    """Values of the batch alone, summed over microbatches by the executor."""',
    ]
    kept = {made.name for made, _ in pcg.hoisted}
    lines += _main_statements(pcg, pcg.prologue, kept, None)
    lines.append(f"    return ({_tuple(made for made, _ in pcg.hoisted)},)")
    return "\n".join(lines)


def _forward(pcg: PCG, weights: _Weights) -> str:
    lines = [
        "def forward(",
        "    ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]",
        ") -> rt.Result:",
    ]
    lines += [
        f"    {identifier(value.name)} = hoisted[{i}]" for i, (_, value) in enumerate(pcg.hoisted)
    ]
    named = (*pcg.updates, *pcg.outputs)
    kept = {value.name for _, value in named} | {value.name for value in pcg.leaving}
    kept |= {pcg.loss.name} if pcg.loss else set()
    lines += _main_statements(pcg, pcg.main.body, kept, weights)
    parts = [f"loss={identifier(pcg.loss.name)}" if pcg.loss else "loss=torch.zeros(())"]
    unsummed = tuple(a for a in pcg.loss.layout.partial_axes if a != TIME) if pcg.loss else ()
    if unsummed:
        parts.append(f"partial={unsummed!r}")
    leaving = zip(pcg.graph.leaving, pcg.leaving, strict=True)
    fields = ("updates", pcg.updates), ("outputs", pcg.outputs), ("leaving", tuple(leaving))
    for field, pairs in fields:
        if pairs:
            entries = ", ".join(f"{name!r}: {identifier(value.name)}" for name, value in pairs)
            parts.append(f"{field}={{{entries}}}")
    lines.append(f"    return rt.Result({', '.join(parts)})")
    return "\n".join(lines)


def _main_statements(
    pcg: PCG, body: Iterable[Item], kept: set[str], weights: _Weights | None
) -> list[str]:
    """Statements of main: each input is fetched where it is first read."""
    items = tuple(body)
    fetched: set[str] = set()
    fetch = {i.value.name: i for i in pcg.graph.inputs}
    lines: list[str] = []
    before: dict[int, list[str]] = {}
    for index, item in enumerate(items):
        values = operands_of(item)
        if isinstance(item, PCall) and weights:
            values = weights.split(item)[0]
        for value in values:
            if value.name in fetch and value.name not in fetched:
                fetched.add(value.name)
                before.setdefault(index, []).append(_fetch(fetch[value.name]))
    for name in sorted(kept - fetched):
        if name in fetch:
            before.setdefault(len(items), []).append(_fetch(fetch[name]))
    lines += _statements(pcg, items, kept, prefix="", weights=weights, before=before)
    return lines


def _fetch(entry: Input) -> str:
    """The statement that brings an input of main into a local name."""
    name = identifier(entry.value.name)
    if entry.kind == "constant":
        spec = entry.value.spec
        data, dtype = literal(entry.data), literal(Dtype(spec.dtype))
        key = f"{name}:{sha256(data.encode()).hexdigest()[:8]}"
        return f"{name} = ctx.constant({key!r}, {data}, {dtype}, {literal(spec.shape)})"
    getter = {"parameter": "ctx.weight({!r})", "buffer": "ctx.buffer({!r})"}.get(
        entry.kind, "batch[{!r}]"
    )
    return f"{name} = {getter.format(entry.target)}"


def _statements(
    pcg: PCG,
    body: Iterable[Item],
    kept: set[str],
    *,
    prefix: str | None,
    weights: _Weights | None,
    before: dict[int, list[str]] | None = None,
    parts: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """One line per item; values are deleted after the section in which they are last read.

    Items of `parts` stand in the context that tells the runtime which part is run.
    """
    items = tuple(body)
    touched = [(*results_of(item), *operands_of(item)) for item in items]
    last = {v.name: index for index, values in enumerate(touched) for v in values}
    lines: list[str] = []
    section = None
    part: int | None = None
    dead: list[str] = []
    made: set[str] = set()
    for index, item in enumerate(items):
        title = _section(item)
        before_part, part = part, parts.get(results_of(item)[0].name)
        indent = "    " * (1 + (part is not None and part == before_part))
        if title is not None and title != section:
            if dead:
                lines.append(f"{indent}del {', '.join(map(identifier, dead))}")
                dead = []
            section = title
            lines += ["", f"{indent}{comment(title)}"] if lines else [f"{indent}{comment(title)}"]
        if part is not None and part != before_part:
            lines.append(f"    with ctx.again({part}):")
        indent = "    " * (1 + (part is not None))
        lines += [f"{indent}{line}" for line in (before or {}).get(index, ())]
        lines += [f"{indent}{line}" for line in _statement(pcg, item, prefix, weights)]
        made.update(v.name for v in results_of(item))
        read = {v.name for v in touched[index]} & made - kept
        dead += sorted(name for name in read if last[name] == index)
    lines += [f"    {line}" for line in (before or {}).get(len(items), ())]
    return lines


def _section(item: Item) -> str | None:
    if isinstance(item, Compute):
        source = f"  ({item.node.source})" if item.node.source else ""
        return f"{item.node.path or '(top)'}{source}"
    return item.prefix if isinstance(item, PCall) else None


def _statement(pcg: PCG, item: Item, prefix: str | None, weights: _Weights | None) -> Iterator[str]:
    targets = ", ".join(identifier(v.name) for v in results_of(item))
    if isinstance(item, Compute):
        code = expression(pcg, item, prefix)
        if len(item.results) == 1 and _returns_tuple(item.node):
            targets += ","
    elif isinstance(item, Movement):
        code = _movement(item)
    else:
        assert weights is not None
        inputs, own = weights.split(item)
        names = _tuple(inputs) + ("," if len(inputs) == 1 else "")
        units = tuple(weights.targets[v.name] for v in own)
        tail = ", recompute=True" if item.policy == "recompute" else ""
        remake = pcg.by_name[item.function].remake
        if remake is not None:
            tail = f", again={identifier(remake.name)}"
        function = identifier(item.function)
        code = f"ctx.call({function}, {item.prefix!r}, ({names}), {units!r}{tail})"
    line = f"{targets} = {code}"
    if pcg.mesh.num_ranks > 1 and not isinstance(item, PCall):
        first = results_of(item)[0]
        line += f"  {comment(describe(first.layout, first.spec.shape, pcg.mesh))}"
    yield line


def _returns_tuple(node: Node) -> bool:
    return op_of(node).returns_list


def expression(pcg: PCG, item: Compute, prefix: str | None) -> str:
    """The code of one operator; its operands go by their names. `prefix` is that of the call, None
    where it is the variable `prefix`.
    """
    node = item.node
    if not is_operator(node.op):
        raise VerifyError(f"{node.op!r} is no operator's name")
    site = Site(node, tuple(v.spec for v in item.operands))
    path = ".".join(p for p in (prefix, node.path) if p)
    tail = f"{path}:{node.op}#{node.index}"
    joint = "." if node.path else ""
    key = repr(tail) if prefix is not None else "prefix + " + repr(f"{joint}{tail}")
    emission = Emission(
        site,
        item.rule,
        dict(item.assignment),
        pcg.mesh,
        {v.name: identifier(v.name) for v in item.operands},
        key,
        tuple(v.layout for v in item.operands),
        tuple(v.layout for v in item.results),
        adjacent=item.adjacent,
    )
    return op_of(node).source(emission)


def _movement(item: Movement) -> str:
    step = item.step
    adjoint = ADJOINTS[step.row]
    name = step.row.removesuffix("_varying")
    x = identifier(item.operand.name)
    parts = [x, "ctx", repr(step.axes)]
    if name in ("partition", "combine", "reduce_scatter", "pad"):
        parts += [f"dim={step.dim}", f"inner={step.inner}"]
    elif name == "all_to_all":
        parts += [f"gather={(step.dim, step.inner)!r}", f"split={step.split!r}"]
    elif name == "halo_exchange":
        parts += [f"dim={step.dim}", f"before={step.halo[0]}", f"after={step.halo[1]}"]
    elif name == "reduce" and step.reduction != "sum":
        parts.append(f"op={step.reduction!r}")
    return f'rt.{name}({", ".join(parts)}, backward="{adjoint.backward}")'
