"""The second proof of rules: Z3 refutes that both sides differ, from axioms that know shapes.

Tensors are one sort, and `dim(a, -1)` is a size of one. An axiom is an equation with the condition
under which it holds: parts meet only where they were put together at the same place. Each side of
an equation that has all of its variables is a pattern by which Z3 applies it. A rule is proved
where the solver ends within a fixed amount of work (`rlimit`, no clock) and finds a contradiction;
whatever else it says is a refusal. Z3 is needed only where rules are generated or checked (the
extra `rules`).

Operators are read as a few functions (`linear(x, w)` as `mm(x, t(w))`); what is not is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import z3

from parloom.ir.ops.exact import number
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import ONE
from parloom.rewrite.terms import LEAD, Arg, Extent, Name, Size, Term

# What the solver may do for one rule, in its own units; those that it proves take a few thousand.
RLIMIT = 200_000
DIMS = (-1, -2, -3)

Shape = tuple[Size | str, ...]
T, INT, REAL = z3.DeclareSort("Tensor"), z3.IntSort(), z3.RealSort()
# Of matrices and rows of matrices: the last two dims are multiplied, the first ones are the rows'.
FUNCTIONS: Mapping[str, Any] = {
    name: z3.Function(name, *sorts)
    for name, sorts in {
        "dim": (T, INT, INT),
        "mm": (T, T, T),
        "bmm": (T, T, T),  # of each pair in two batches
        "t": (T, T),
        "add": (T, T, T),
        "mul": (T, T, T),
        "add_row": (T, T, T),  # a row to each row
        "mul_row": (T, T, T),
        "mul_column": (T, T, T),  # each row by a number
        "scale": (REAL, T, T),
        "cat": (INT, T, T, T),
        "cut": (INT, T, INT, INT, T),  # along a dim, from a place to another
        "f": (INT, T, T),  # a function of elements, by its number
        "rows": (INT, INT, T, T),  # a function along a dim, by its number
        "total": (INT, T, T),  # a sum over a dim, which is gone
        "look": (T, T, T),  # rows of a table
        "conv": (INT, T, T, T),  # over the last dim, by its number; 0 moves by one place
        "sums": (INT, T, T, T),  # of any windows times kernels, by their number
        "flat": (T, T),  # the elements as one row
        "add_channel": (T, T, T),  # a number to each element of a channel, which are dim 1
        "mul_channel": (T, T, T),
        "mul_kernel": (T, T, T),  # what makes each output, by a number
        "pool": (INT, T, T),  # means of windows of the last dim, by their number
        "inverse": (INT, REAL),  # of a size
        # Read by `halos`: windows of the last dim that reach so many places further, zeros of three
        # sizes, a mirrored last dim, and so many copies of its place.
        "near": (INT, INT, T, T, T),
        "zeros": (INT, INT, INT, T),
        "mirror": (T, T),
        "again": (INT, T, T),
    }.items()
}
VARIABLES: Mapping[str, Any] = {
    **{name: z3.Const(name, T) for name in "abcdv"},
    **{name: z3.Int(name) for name in ("i", "j", "s", "e")},
    **{name: z3.Real(name) for name in ("q", "r")},
}

# Shapes: what each size of a call is, from the last.
SHAPES = (
    ("mm(a, b)", ("dim(b, -1)", "dim(a, -2)", "dim(a, -3)")),
    ("bmm(a, b)", ("dim(b, -1)", "dim(a, -2)", "dim(a, -3)")),
    ("t(a)", ("dim(a, -2)", "dim(a, -1)", "dim(a, -3)")),
    *(
        (call, ("dim(a, -1)", "dim(a, -2)", "dim(a, -3)"))
        for call in (
            "add(a, b)", "mul(a, b)", "add_row(a, v)", "mul_row(a, v)", "mul_column(a, v)",
            "scale(q, a)", "f(i, a)", "rows(i, j, a)",
        )
    ),
    ("conv(i, a, b)", (None, "dim(b, -3)", "dim(a, -3)")),
    ("pool(i, a)", (None, "dim(a, -2)", "dim(a, -3)")),
    ("look(a, b)", ("dim(a, -1)", "dim(b, -1)", "dim(b, -2)")),
    ("total(-1, a)", ("dim(a, -2)", "dim(a, -3)", "dim(a, -4)")),
    ("total(-2, a)", ("dim(a, -1)", "dim(a, -3)", "dim(a, -4)")),
    ("total(-3, a)", ("dim(a, -1)", "dim(a, -2)", "dim(a, -4)")),
)  # fmt: skip
# Equations of all tensors whose shapes fit.
EQUATIONS = """
mm(mm(a, b), c) == mm(a, mm(b, c))
mm(a, add(b, c)) == add(mm(a, b), mm(a, c))
mm(add(a, b), c) == add(mm(a, c), mm(b, c))
mm(scale(q, a), b) == scale(q, mm(a, b))
mm(a, scale(q, b)) == scale(q, mm(a, b))
mul_row(mm(a, b), v) == mm(a, mul_row(b, v))
mul_column(mm(a, b), v) == mm(mul_column(a, v), b)
mm(a, cat(-1, b, c)) == cat(-1, mm(a, b), mm(a, c))
mm(cat(-2, a, b), c) == cat(-2, mm(a, c), mm(b, c))
mm(cat(-3, a, b), c) == cat(-3, mm(a, c), mm(b, c))
mm(cat(-1, a, b), cat(-2, c, d)) == add(mm(a, c), mm(b, d)) if dim(a, -1) == dim(c, -2)
mm(look(a, b), c) == look(mm(a, c), b)
mm(total(-2, a), b) == total(-2, mm(a, b))
mm(total(-3, a), b) == total(-3, mm(a, b))
bmm(bmm(a, b), c) == bmm(a, bmm(b, c)) if And(dim(a, -3) == dim(b, -3), dim(b, -3) == dim(c, -3))
mm(bmm(a, b), c) == bmm(a, mm(b, c)) if dim(a, -3) == dim(b, -3)
bmm(a, add(b, c)) == add(bmm(a, b), bmm(a, c)) if dim(a, -3) == dim(b, -3)
bmm(add(a, b), c) == add(bmm(a, c), bmm(b, c)) if dim(a, -3) == dim(c, -3)
bmm(scale(q, a), b) == scale(q, bmm(a, b))
bmm(a, scale(q, b)) == scale(q, bmm(a, b))
bmm(a, cat(-1, b, c)) == cat(-1, bmm(a, b), bmm(a, c)) if dim(a, -3) == dim(b, -3)
bmm(cat(-2, a, b), c) == cat(-2, bmm(a, c), bmm(b, c)) if dim(a, -3) == dim(c, -3)
bmm(cat(-3, a, b), cat(-3, c, d)) == cat(-3, bmm(a, c), bmm(b, d)) if And(dim(a, -3) == dim(c, -3), dim(b, -3) == dim(d, -3))
bmm(cat(-1, a, b), cat(-2, c, d)) == add(bmm(a, c), bmm(b, d)) if And(dim(a, -1) == dim(c, -2), dim(a, -3) == dim(c, -3))
t(bmm(a, b)) == bmm(t(b), t(a)) if dim(a, -3) == dim(b, -3)
t(t(a)) == a
t(mm(a, b)) == mm(t(b), t(a))
t(add(a, b)) == add(t(a), t(b))
t(mul(a, b)) == mul(t(a), t(b))
t(scale(q, a)) == scale(q, t(a))
t(mul_row(a, v)) == mul_column(t(a), v)
t(mul_column(a, v)) == mul_row(t(a), v)
t(f(i, a)) == f(i, t(a))
t(rows(i, -1, a)) == rows(i, -2, t(a))
t(rows(i, -2, a)) == rows(i, -1, t(a))
t(cat(-1, a, b)) == cat(-2, t(a), t(b))
t(cat(-2, a, b)) == cat(-1, t(a), t(b))
t(cat(-3, a, b)) == cat(-3, t(a), t(b))
add(a, b) == add(b, a)
add(a, add(b, c)) == add(add(a, b), c)
mul(a, b) == mul(b, a)
mul(a, mul(b, c)) == mul(mul(a, b), c)
mul(a, add(b, c)) == add(mul(a, b), mul(a, c))
scale(q, add(a, b)) == add(scale(q, a), scale(q, b))
scale(q, mul(a, b)) == mul(scale(q, a), b)
scale(q, scale(r, a)) == scale(q * r, a)
add(scale(q, a), scale(r, a)) == scale(q + r, a)
add(a, a) == scale(2, a)
scale(1, a) == a
add(a, add_row(b, v)) == add_row(add(a, b), v)
mul_row(add(a, b), v) == add(mul_row(a, v), mul_row(b, v))
mul_row(mul_row(a, v), c) == mul_row(a, mul(v, c))
add_row(add_row(a, v), c) == add_row(a, add(v, c))
mul(a, mul_row(b, v)) == mul_row(mul(a, b), v)
scale(q, mul_row(a, v)) == mul_row(scale(q, a), v)
scale(q, mul_row(a, v)) == mul_row(a, scale(q, v))
scale(q, add_row(a, v)) == add_row(scale(q, a), scale(q, v))
mul_row(add_row(a, v), c) == add_row(mul_row(a, c), mul(v, c))
mul_row(a, add(v, c)) == add(mul_row(a, v), mul_row(a, c))
add_row(cat(-1, a, b), cat(-1, v, c)) == cat(-1, add_row(a, v), add_row(b, c)) if dim(a, -1) == dim(v, -1)
mul_row(cat(-1, a, b), cat(-1, v, c)) == cat(-1, mul_row(a, v), mul_row(b, c)) if dim(a, -1) == dim(v, -1)
add_row(cat(-2, a, b), v) == cat(-2, add_row(a, v), add_row(b, v))
mul_row(cat(-2, a, b), v) == cat(-2, mul_row(a, v), mul_row(b, v))
total(-1, add(a, b)) == add(total(-1, a), total(-1, b))
total(-2, add(a, b)) == add(total(-2, a), total(-2, b))
total(-1, cat(-1, a, b)) == add(total(-1, a), total(-1, b))
total(-2, cat(-2, a, b)) == add(total(-2, a), total(-2, b))
total(-2, cat(-1, a, b)) == cat(-1, total(-2, a), total(-2, b))
total(-1, cat(-2, a, b)) == cat(-1, total(-1, a), total(-1, b))
total(-1, t(a)) == total(-2, a)
total(-2, t(a)) == total(-1, a)
total(j, scale(q, a)) == scale(q, total(j, a))
conv(i, add(a, b), c) == add(conv(i, a, c), conv(i, b, c))
conv(i, a, add(b, c)) == add(conv(i, a, b), conv(i, a, c))
conv(i, scale(q, a), b) == scale(q, conv(i, a, b))
conv(i, a, scale(q, b)) == scale(q, conv(i, a, b))
conv(i, a, cat(-3, b, c)) == cat(-2, conv(i, a, b), conv(i, a, c))
conv(i, cat(-3, a, b), c) == cat(-3, conv(i, a, c), conv(i, b, c))
conv(i, cat(-2, a, b), cat(-2, c, d)) == add(conv(i, a, c), conv(i, b, d)) if dim(a, -2) == dim(c, -2)
conv(i, a, mul_kernel(b, v)) == mul_channel(conv(i, a, b), v)
sums(i, a, mul_kernel(b, v)) == mul_channel(sums(i, a, b), v)
mul_channel(mul_channel(a, v), c) == mul_channel(a, mul(v, c))
add_channel(add_channel(a, v), c) == add_channel(a, add(v, c))
mul_channel(add_channel(a, v), c) == add_channel(mul_channel(a, c), mul(v, c))
pool(i, add(a, b)) == add(pool(i, a), pool(i, b))
pool(i, scale(q, a)) == scale(q, pool(i, a))
pool(i, cat(-2, a, b)) == cat(-2, pool(i, a), pool(i, b))
pool(i, cat(-3, a, b)) == cat(-3, pool(i, a), pool(i, b))
pool(i, conv(0, a, b)) == conv(0, pool(i, a), b) if dim(b, -1) == 1
look(add(a, c), b) == add(look(a, b), look(c, b))
look(scale(q, a), b) == scale(q, look(a, b))
look(f(i, a), b) == f(i, look(a, b))
look(rows(i, -1, a), b) == rows(i, -1, look(a, b))
look(cat(-1, a, c), b) == cat(-1, look(a, b), look(c, b))
look(a, cat(-1, b, c)) == cat(-2, look(a, b), look(a, c))
""".strip().splitlines()  # noqa: E501
# Those of each dim `k`, and of each other dim `o`.
OF_EACH_DIM = """
cat(k, a, cat(k, b, c)) == cat(k, cat(k, a, b), c)
cut(k, cat(k, a, b), s, e) == cut(k, a, s, e) if e <= dim(a, k)
cut(k, cat(k, a, b), s, e) == cut(k, b, s - dim(a, k), e - dim(a, k)) if s >= dim(a, k)
cut(k, a, s, e) == a if And(s == 0, e == dim(a, k))
cat(k, f(i, a), f(i, b)) == f(i, cat(k, a, b))
cat(k, scale(q, a), scale(q, b)) == scale(q, cat(k, a, b))
cat(k, add(a, c), add(b, d)) == add(cat(k, a, b), cat(k, c, d)) if dim(a, k) == dim(c, k)
cat(k, mul(a, c), mul(b, d)) == mul(cat(k, a, b), cat(k, c, d)) if dim(a, k) == dim(c, k)
""".strip().splitlines()
OF_TWO_DIMS = """
cat(k, cat(o, a, b), cat(o, c, d)) == cat(o, cat(k, a, c), cat(k, b, d)) if dim(a, o) == dim(c, o)
rows(i, k, cat(o, a, b)) == cat(o, rows(i, k, a), rows(i, k, b))
""".strip().splitlines()


class NotReadError(Exception):
    """A term that the axioms say nothing of."""


def prove_by_axioms(rule: Rule, rlimit: int = RLIMIT) -> str:
    """Empty where Z3 proves a rule; why not, otherwise."""
    sizes = {name: z3.Int(f"size_{name}") for name in (*rule.extents, LEAD)}
    inputs = {own.name: z3.Const(f"input_{own.name}", T) for own in rule.inputs}
    shapes = {own.name: own.sizes for own in rule.inputs}
    solver = z3.Solver()
    # Quantifiers by patterns alone: no model is asked for.
    solver.set("auto_config", False)
    solver.set("smt.mbqi", False)
    solver.set("rlimit", rlimit)
    solver.add(*axioms(), *(size >= 1 for size in sizes.values()))
    for own in rule.inputs:
        for place, size in enumerate(reversed(own.sizes)):
            extent = sizes[LEAD] if isinstance(size, str) else _size(size, sizes)
            solver.add(FUNCTIONS["dim"](inputs[own.name], -1 - place) == extent)
    reading = Reading(inputs, sizes, shapes)
    try:
        sides = [tuple(map(reading.term, pair)) for pair in zip(rule.left, rule.right, strict=True)]
    except NotReadError as error:
        return f"no axioms: {error}"
    solver.add(z3.Or(*(one != other for one, other in sides)))
    found = solver.check()
    return "" if found == z3.unsat else f"Z3 says {found}"


@lru_cache(maxsize=1)
def axioms() -> tuple[Any, ...]:
    """All of them."""
    found = [axiom(f"{_call(call, k)} == {size}", {}) for call, k, size in _sizes()]
    found += [axiom(line, {}) for line in EQUATIONS]
    found += [axiom(line, {"k": k}) for line in OF_EACH_DIM for k in DIMS]
    pairs = [(k, o) for k in DIMS for o in DIMS if k != o]
    found += [axiom(line, {"k": k, "o": o}) for line in OF_TWO_DIMS for k, o in pairs]
    return tuple(found)


def _sizes() -> Iterator[tuple[str, int, str]]:
    """Calls with a dim, and the size of that dim."""
    for call, sizes in SHAPES:
        yield from ((call, -1 - place, size) for place, size in enumerate(sizes) if size)
    for k in DIMS:
        for o in DIMS:
            both = f"dim(a, {o}) + dim(b, {o})" if k == o else f"dim(a, {o})"
            yield f"cat({k}, a, b)", o, both
            yield f"cut({k}, a, s, e)", o, "e - s" if k == o else f"dim(a, {o})"


def _call(call: str, k: int) -> str:
    return f"dim({call}, {k})"


def axiom(line: str, dims: Mapping[str, int]) -> Any:
    """An equation with its condition, for all values of its variables."""
    equation, _, condition = line.partition(" if ")
    left, right = (_read(side, dims) for side in equation.split(" == "))
    body = left == right
    if condition:
        body = z3.Implies(_read(condition, dims), body)
    used = [VARIABLES[name] for name in VARIABLES if _has(body, VARIABLES[name])]
    sides = [_inner(side) for side in (left, right)]
    patterns = [
        side
        for side in sides
        if z3.is_app(side) and side.num_args() and all(_has(side, own) for own in used)
    ]
    return z3.ForAll(used, body, patterns=patterns)


def _inner(side: Any) -> Any:
    """Of the size of a call, the call: that is what there is to meet."""
    return side.arg(0) if z3.is_app(side) and side.decl().name() == "dim" else side


def _read(text: str, dims: Mapping[str, int]) -> Any:
    """Text of this module as an expression."""
    names = {**FUNCTIONS, **VARIABLES, **dims, "And": z3.And}
    return eval(text, {"__builtins__": {}}, names)


def _has(expression: Any, variable: Any) -> bool:
    if expression.eq(variable):
        return True
    return any(_has(own, variable) for own in expression.children())


def _size(size: Size, sizes: Mapping[str, Any]) -> Any:
    blocks = [reduce(lambda a, b: a * b, (sizes[n] for n in b), z3.IntVal(1)) for b in size]
    return z3.simplify(reduce(lambda a, b: a + b, blocks))


class Reading:
    """Terms as expressions; `shapes` are those of inputs."""

    def __init__(
        self, inputs: Mapping[str, Any], sizes: Mapping[str, Any], shapes: Mapping[str, Shape]
    ) -> None:
        self._inputs, self._sizes, self._shapes = inputs, sizes, shapes
        self._numbers: dict[object, int] = {}

    def term(self, arg: Arg) -> Any:
        """A term; raises `NotReadError`."""
        if isinstance(arg, Name):
            return self._inputs[arg.name]
        if not isinstance(arg, Term):
            raise NotReadError(f"{arg} as a tensor")
        read: Callable[[Term], Any] | None = getattr(self, f"_{arg.op}", None)
        if read is not None:
            return read(arg)
        tensors = [own for own in arg.args if isinstance(own, (Term, Name))]
        if len(tensors) != 1 or arg.op not in UNARY:
            raise NotReadError(arg.op)
        others = tuple(str(own) for own in arg.args if own is not tensors[0])
        return FUNCTIONS["f"](self._number(arg.op, others), self.term(tensors[0]))

    def rank(self, arg: Arg) -> int:
        """The dims of a term."""
        if isinstance(arg, Name):
            return len(self._shapes[arg.name])
        if isinstance(arg, tuple):
            return self.rank(arg[0])
        assert isinstance(arg, Term)
        if arg.op == "embedding":
            return self.rank(arg.args[1]) + 1
        if arg.op == "view" and isinstance(arg.args[1], tuple):
            return len(arg.args[1])
        if arg.op in ("add", "mul"):  # the wider one
            return max(self.rank(own) for own in arg.args if isinstance(own, (Term, Name)))
        return self.rank(arg.args[0]) - (arg.op in ("sum", "mean"))

    def _number(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _dim(self, arg: Arg, of: Arg) -> int:
        if not isinstance(arg, int):
            raise NotReadError(f"dim {arg}")
        place = arg if arg < 0 else arg - self.rank(of)
        if place not in DIMS:
            raise NotReadError(f"dim {place}")
        return place

    def _linear(self, term: Term) -> Any:
        made = FUNCTIONS["mm"](self.term(term.args[0]), FUNCTIONS["t"](self.term(term.args[1])))
        return self._biased(made, term, "add_row")

    def _biased(self, made: Any, term: Term, add: str) -> Any:
        bias = term.args[2] if len(term.args) > 2 else None
        return made if bias is None else FUNCTIONS[add](made, self.term(bias))

    def _mm(self, term: Term) -> Any:
        return FUNCTIONS["mm"](*map(self.term, term.args))

    def _matmul(self, term: Term) -> Any:
        if self.rank(term.args[1]) == 2:
            return self._mm(term)
        if self.rank(term.args[0]) != self.rank(term.args[1]):
            raise NotReadError("a product with a batch that only its right side has")
        return FUNCTIONS["bmm"](*map(self.term, term.args))

    def _t(self, term: Term) -> Any:
        return FUNCTIONS["t"](self.term(term.args[0]))

    def _transpose(self, term: Term) -> Any:
        x, *dims = term.args
        if {self._dim(dim, x) for dim in dims} != {-1, -2}:
            raise NotReadError("transpose of other dims")
        return FUNCTIONS["t"](self.term(x))

    def _neg(self, term: Term) -> Any:
        return FUNCTIONS["scale"](z3.RealVal(-1), self.term(term.args[0]))

    def _view(self, term: Term) -> Any:
        """Elements as one row: nothing is said of other shapes."""
        x, shape = term.args
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise NotReadError("view")
        return self.term(x) if self.rank(x) == 1 else FUNCTIONS["flat"](self.term(x))

    def _add(self, term: Term) -> Any:
        one, other = term.args[:2]
        if isinstance(other, (int, float)):
            return FUNCTIONS["f"](self._number("add", other, *term.args[2:]), self.term(one))
        return self._pair(term, "add", "add_row", "add_channel")

    def _sub(self, term: Term) -> Any:
        one, other = map(self.term, term.args)
        if self.rank(term.args[0]) != self.rank(term.args[1]):
            raise NotReadError("sub of other dims")
        return FUNCTIONS["add"](one, FUNCTIONS["scale"](z3.RealVal(-1), other))

    def _mul(self, term: Term) -> Any:
        one, other = term.args
        if isinstance(other, (int, float)):
            return FUNCTIONS["scale"](_real(number(other)), self.term(one))
        if isinstance(other, Term) and other.op == "unsqueeze" and other.args[1] == -1:
            return FUNCTIONS["mul_column"](self.term(one), self.term(other.args[0]))
        if (column := self._column(other)) is not None and self.rank(one) == self.rank(other):
            by = "mul_column" if self.rank(one) == 2 else "mul_kernel"
            return FUNCTIONS[by](self.term(one), column)
        return self._pair(term, "mul", "mul_row", "mul_channel")

    def _column(self, arg: Arg) -> Any:
        """The row that is seen as numbers along the first dim; None where another is."""
        if not isinstance(arg, Term) or arg.op != "view":
            return None
        x, shape = arg.args
        if not isinstance(shape, tuple) or len(shape) < 2 or any(own != 1 for own in shape[1:]):
            return None
        return self._view(Term("view", (x, shape[:1])))

    def _of_channels(self, arg: Arg, rank: int) -> Any:
        """The row of an input of one number for each channel of a tensor of three dims or more;
        None where it is another.
        """
        shape = self._shapes[arg.name] if isinstance(arg, Name) else ()
        if rank < 3 or len(shape) not in (rank - 1, rank):
            return None
        others = [*shape[: 1 - rank], *shape[len(shape) + 2 - rank :]]
        return None if any(own != ONE for own in others) else FUNCTIONS["flat"](self.term(arg))

    def _div(self, term: Term) -> Any:
        one, other = term.args
        if not isinstance(other, (int, float)):
            raise NotReadError("div by a tensor")
        return FUNCTIONS["scale"](_real(1 / number(other)), self.term(one))

    def _pair(self, term: Term, alike: str, row: str, channel: str) -> Any:
        one, other = term.args[:2]
        if len(term.args) > 2 or not all(isinstance(own, (Term, Name)) for own in (one, other)):
            raise NotReadError(str(term))
        ranks = self.rank(one), self.rank(other)
        for wide, narrow, rank in ((one, other, ranks[0]), (other, one, ranks[1])):
            if (numbers := self._of_channels(narrow, rank)) is not None:
                return FUNCTIONS[channel](self.term(wide), numbers)
        if ranks[0] == ranks[1]:
            return FUNCTIONS[alike](self.term(one), self.term(other))
        if 1 not in ranks:
            raise NotReadError(f"{term.op} of other dims")
        wide, narrow = (one, other) if ranks[1] == 1 else (other, one)
        return FUNCTIONS[row](self.term(wide), self.term(narrow))

    def _cat(self, term: Term) -> Any:
        parts, at = term.args
        assert isinstance(parts, tuple)
        dim = self._dim(at, parts)
        return reduce(lambda a, b: FUNCTIONS["cat"](dim, a, b), map(self.term, parts))

    def _split_with_sizes(self, term: Term) -> Any:
        x, sizes, at = term.args
        assert isinstance(sizes, tuple)
        extents = [_size(own.size, self._sizes) for own in sizes if isinstance(own, Extent)]
        if len(extents) != len(sizes):
            raise NotReadError("sizes that are numbers")
        index = term.result or 0
        begin = z3.simplify(z3.Sum(z3.IntVal(0), *extents[:index]))
        end = z3.simplify(begin + extents[index])
        return FUNCTIONS["cut"](self._dim(at, x), self.term(x), begin, end)

    def _softmax(self, term: Term) -> Any:
        x, at = term.args
        return FUNCTIONS["rows"](self._number(term.op), self._dim(at, x), self.term(x))

    _log_softmax = _softmax

    def _sum(self, term: Term) -> Any:
        x, dims = term.args
        if not isinstance(dims, tuple) or len(dims) != 1:
            raise NotReadError("sum over several dims")
        return FUNCTIONS["total"](self._dim(dims[0], x), self.term(x))

    def _mean(self, term: Term) -> Any:
        x, dims = term.args
        assert isinstance(dims, tuple)
        size = FUNCTIONS["dim"](self.term(x), self._dim(dims[0], x))
        return FUNCTIONS["scale"](FUNCTIONS["inverse"](size), self._sum(term))

    def _conv1d(self, term: Term) -> Any:
        how = list(term.args[3:])
        key = 0 if not how else 1 + self._number(term.op, *how)
        name = "conv" if term.op == "conv1d" and how[3:] in ([], [1]) else "sums"
        made = FUNCTIONS[name](key, *map(self.term, term.args[:2]))
        return self._biased(made, term, "add_channel")

    _conv2d = _conv3d = _conv1d

    def _batch_norm(self, term: Term) -> Any:
        x, weight, bias, mean, variance, of_batch, _, eps = term.args[:8]
        if of_batch is not False or mean is None or variance is None:
            raise NotReadError("statistics of the batch")
        what = "row" if self.rank(x) == 2 else "channel"
        add, mul = FUNCTIONS[f"add_{what}"], FUNCTIONS[f"mul_{what}"]
        made = add(self.term(x), self.term(Term("neg", (mean,))))
        made = mul(made, self.term(Term("rsqrt", (Term("add", (variance, eps)),))))
        made = made if weight is None else mul(made, self.term(weight))
        return made if bias is None else add(made, self.term(bias))

    def _avg_pool1d(self, term: Term) -> Any:
        return FUNCTIONS["pool"](self._number(*term.args[1:]), self.term(term.args[0]))

    def _embedding(self, term: Term) -> Any:
        return FUNCTIONS["look"](*map(self.term, term.args[:2]))


# Functions of elements of which the axioms know no more.
UNARY = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "exp", "clamp",
                   "rsqrt"})  # fmt: skip


def _real(value: Fraction) -> Any:
    return z3.RealVal(f"{value.numerator}/{value.denominator}")
