"""Programs as terms: calls of operators of the graph, of named inputs.

A term is written as Python writes a call: `split_with_sizes(linear(x, cat((w0, w1), 0)), (n0, n1),
-1)[1]`. Inputs are declared with their sizes, `x[*, k]`, and numbers of rows with what they are
below, `at[*] < v`; sizes are sums of products of names and of numbers of places, and `*` stands for
any dims before those that are named.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import copysign
from typing import Any

from parloom.errors import InputError
from parloom.ir.ops.algebra import Algebra
from parloom.ir.ops.exact import Exact, Given
from parloom.rewrite.parallel import computes_of, product_of

LEAD, CAT, SPLIT = "*", "cat", "split_with_sizes"
MOST_MARKS = 500
"""Calls and operators in the text of a term."""
MOST_PLACES = 1 << 16
"""Places of a window."""
_INPUT = re.compile(r"\s*([A-Za-z_]\w*)\[([^\]]*)\]\s*(?:<([^,]+))?(?:,|$)")
Size = tuple[tuple[str, ...], ...]
"""A sum of products of names."""


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a term is of; the first of its sizes may be `*`. One of integers is of numbers
    from zero and `below` a size.
    """

    name: str
    sizes: tuple[Size | str, ...]
    below: Size | None = None

    def __str__(self) -> str:
        sizes = (size if isinstance(size, str) else size_text(size) for size in self.sizes)
        below = "" if self.below is None else f" < {size_text(self.below)}"
        return f"{self.name}[{', '.join(sizes)}]{below}"


@dataclass(frozen=True, slots=True)
class Name:
    """An input by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Extent:
    """A size as an argument."""

    size: Size

    def __str__(self) -> str:
        return size_text(self.size)


@dataclass(frozen=True, slots=True)
class Term:
    """Result `result` of a call; of operators that return one tensor that is 0."""

    op: str
    args: tuple["Arg", ...]
    result: int | None = None

    def __str__(self) -> str:
        call = f"{self.op}({', '.join(map(arg_text, self.args))})"
        return call if self.result is None else f"{call}[{self.result}]"


Arg = Term | Name | Extent | int | float | str | None | tuple["Arg", ...]


def size_text(size: Size) -> str:
    """`n0 + h * d`."""
    return " + ".join(" * ".join(block) or "1" for block in size)


def arg_text(arg: Arg) -> str:
    """An argument as it is read."""
    if isinstance(arg, tuple):
        inner = ", ".join(map(arg_text, arg))
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    return str(arg) if isinstance(arg, (Term, Name, Extent)) else repr(arg)


def in_pairs(arg: Arg) -> Arg:
    """A term in which what is joined or split, is so two by two, the first ones first, as rules
    have it.
    """
    if isinstance(arg, tuple):
        return tuple(map(in_pairs, arg))
    if not isinstance(arg, Term):
        return arg
    args = tuple(map(in_pairs, arg.args))
    if arg.op == CAT and isinstance(args[0], tuple) and len(args[0]) > 2:
        return reduce(lambda one, other: Term(CAT, ((one, other), *args[1:])), args[0])
    sizes = args[1] if arg.op == SPLIT and arg.result is not None else None
    if isinstance(sizes, tuple) and all(isinstance(size, int) for size in sizes):
        return _part(args[0], sizes, args[2:], arg.result or 0)  # type: ignore[arg-type]
    return Term(arg.op, args, arg.result)


def _part(whole: Arg, sizes: tuple[int, ...], rest: tuple[Arg, ...], index: int) -> Arg:
    """A part of a tensor, of two at a time."""
    last = len(sizes) - 1
    while last > 1:
        pair = (sum(sizes[:last]), sizes[last])
        if index == last:
            return Term(SPLIT, (whole, pair, *rest), 1)
        whole, last = Term(SPLIT, (whole, pair, *rest), 0), last - 1
    return Term(SPLIT, (whole, sizes[:2], *rest), index)


def joined_at_once(arg: Arg) -> Arg:
    """The inverse of `in_pairs`, however the parts were joined or split."""
    if isinstance(arg, tuple):
        return tuple(map(joined_at_once, arg))
    if not isinstance(arg, Term):
        return arg
    args = tuple(map(joined_at_once, arg.args))
    if arg.op == CAT and isinstance(args[0], tuple):
        parts = list[Arg]()
        for part in args[0]:
            inner = isinstance(part, Term) and part.op == CAT and part.args[1:] == args[1:]
            parts += part.args[0] if inner else (part,)  # type: ignore[union-attr,arg-type]
        args = (tuple(parts), *args[1:])
    whole = args[0] if arg.op == SPLIT else None
    if isinstance(whole, Term) and whole.op == SPLIT and whole.args[2:] == args[2:]:
        before, at = whole.args[1], whole.result or 0
        if isinstance(before, tuple) and isinstance(args[1], tuple):
            sizes = (*before[:at], *args[1], *before[at + 1 :])
            return Term(SPLIT, (whole.args[0], sizes, *args[2:]), at + (arg.result or 0))
    return Term(arg.op, args, arg.result)


def parse_inputs(text: str) -> tuple[Input, ...]:
    """`x[*, k], w[n, k]`; raises `InputError`."""
    found, at = [], 0
    while at < len(text):
        match = _INPUT.match(text, at)
        if match is None:
            raise InputError(f"{text[at:]!r} is no input, as x[*, k] is")
        sizes = [own.strip() for own in match[2].split(",")] if match[2].strip() else []
        shape = tuple(own if own == LEAD else parse_size(own) for own in sizes)
        found.append(Input(match[1], shape, parse_size(match[3]) if match[3] else None))
        at = match.end()
    return tuple(found)


def parse_size(text: str) -> Size:
    """`n0 + h * d`, or `1`; raises `InputError`."""
    return _size(_expression(text), text)


def parse_term(text: str, inputs: Sequence[Input]) -> Term | Name:
    """A term of `inputs`; raises `InputError`."""
    found = _arg(_expression(text), text, {own.name for own in inputs})
    if not isinstance(found, (Term, Name)):
        raise InputError(f"{text!r} is no term")
    return found


def parse_call(text: str) -> Term:
    """A call in which every word is an input; raises `InputError`."""
    found = _arg(_expression(text), text, None)
    if not isinstance(found, Term) or has_minus_zero(found):
        raise InputError(f"{text!r} is no call")
    return found


def has_minus_zero(arg: Any) -> bool:
    """Whether an argument has -0.0, which Python has equal to zero, and functions need not."""
    if isinstance(arg, Term):
        return has_minus_zero(arg.args)
    if isinstance(arg, tuple):
        return any(map(has_minus_zero, arg))
    return isinstance(arg, float) and arg == 0 and copysign(1, arg) < 0


def extents_of(inputs: Iterable[Input]) -> tuple[str, ...]:
    """The names in all sizes of inputs, in order."""
    sizes: list[Size] = []
    for own in inputs:
        sizes += [size for size in own.sizes if not isinstance(size, str)]
        sizes += [own.below] if own.below is not None else []
    return tuple(dict.fromkeys(name for size in sizes for block in size for name in block))


def extents_in(arg: Arg) -> Iterator[Size]:
    """The sizes that a term is told."""
    if isinstance(arg, Extent):
        yield arg.size
    for inner in arg.args if isinstance(arg, Term) else arg if isinstance(arg, tuple) else ():
        yield from extents_in(inner)


def names_in(arg: Arg) -> Iterator[str]:
    """The inputs that a term is of, in order, with repeats."""
    if isinstance(arg, Name):
        yield arg.name
    for inner in arg.args if isinstance(arg, Term) else arg if isinstance(arg, tuple) else ():
        yield from names_in(inner)


def calls_in(arg: Arg) -> Iterator[Term]:
    """The calls of a term, each once and after those that it reads, whatever result is read."""
    seen: dict[Term, None] = {}

    def visit(arg: Arg) -> None:
        for inner in arg.args if isinstance(arg, Term) else arg if isinstance(arg, tuple) else ():
            visit(inner)
        if isinstance(arg, Term):
            seen.setdefault(Term(arg.op, arg.args))

    visit(arg)
    yield from seen


def evaluate(
    terms: Sequence[Term | Name],
    algebra: Algebra[Any],
    inputs: Mapping[str, Any],
    sizes: Mapping[str, Any],
    as_run: Callable[[Exact], Exact] = lambda computes: computes,
) -> list[Any]:
    """What terms are in an algebra, of its tensors for inputs and its sizes for names; each call is
    made once, `as_run` of what its operator computes. Raises `InputError` for an operator that says
    not what it computes.
    """
    known: dict[Term, tuple[Any, ...]] = {}

    def value(arg: Arg) -> Any:
        if isinstance(arg, Name):
            return inputs[arg.name]
        if isinstance(arg, Extent):
            return size_in(arg.size, sizes, algebra.one)
        if isinstance(arg, tuple):
            return tuple(map(value, arg))
        if not isinstance(arg, Term):
            return arg
        call = Term(arg.op, arg.args)
        if call not in known:
            computes = computes_of(arg.op)
            if computes is None:
                raise InputError(f"{arg.op} says not what it computes")
            known[call] = as_run(computes)(algebra, Given(tuple(map(value, arg.args))))
        return known[call][arg.result or 0]

    return [value(term) for term in terms]


def size_in(size: Size, sizes: Mapping[str, Any], one: Any) -> Any:
    """A size of which an algebra knows the names and `one`: a number, or the blocks of a dim, whose
    sum is one after the other.
    """
    blocks = [reduce(product_of, (sizes[name] for name in block), one) for block in size]
    return reduce(operator.add, blocks)


def _expression(text: str) -> ast.expr:
    # Python's parser, and all that goes through what it reads, nests as deeply as the text does.
    depth = max(text.count(mark) for mark in "([.-+~*")
    if depth > MOST_MARKS:
        raise InputError(f"{text[:40]!r}... is no term: it has {depth} calls or operators")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{text!r} cannot be read: {error}") from None


def _size(node: ast.expr, text: str) -> Size:
    if isinstance(node, ast.Name):
        return ((node.id,),)
    number = node.value if isinstance(node, ast.Constant) else None
    if isinstance(number, int) and 0 < number <= MOST_PLACES:
        return ((),) * number
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (*_size(node.left, text), *_size(node.right, text))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _size(node.left, text), _size(node.right, text)
        if len(left) == len(right) == 1:
            return ((*left[0], *right[0]),)
    raise InputError(f"{text!r} is no size: a sum of products of names and of numbers of places")


def _arg(node: ast.expr, text: str, inputs: set[str] | None) -> Arg:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        call, result = _arg(node.value, text, inputs), node.slice.value
        if isinstance(call, Term) and isinstance(result, int):
            return Term(call.op, call.args, result)
    if isinstance(node, ast.Call) and not node.keywords:
        return Term(_operator(node.func), tuple(_arg(own, text, inputs) for own in node.args))
    if isinstance(node, ast.Tuple):
        return tuple(_arg(own, text, inputs) for own in node.elts)
    if isinstance(node, ast.Name) and (inputs is None or node.id in inputs):
        return Name(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _arg(node.operand, text, inputs)
        if isinstance(number, (int, float)):
            return -number
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, type(None))):
        return node.value
    if inputs is not None and isinstance(node, (ast.Name, ast.BinOp)):
        return Extent(_size(node, text))
    raise InputError(f"{ast.unparse(node)!r} in {text!r} is no argument of a term")


def _operator(node: ast.expr) -> str:
    """The name of an operator, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_operator(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise InputError(f"{ast.unparse(node)!r} is no operator")
