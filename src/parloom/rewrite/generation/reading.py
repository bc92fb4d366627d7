"""Terms as expressions of the second proof (`axioms.py`): `linear(x, w)` is `mm(x, t(w))`.

What is not read is refused, and what is of shapes of which the functions say nothing: operators
repeat dims of one element, functions do not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from hashlib import blake2b
from math import prod
from typing import Any

import z3

from parloom.errors import InputError
from parloom.ir.ops.exact import number
from parloom.rewrite.generation.equations import DIMS, FUNCTIONS, T
from parloom.rewrite.shapes import ARGUMENTS, Dims, Shapes
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.terms import LEAD, Arg, Extent, Input, Name, Size, Term, evaluate, size_in

MOST_COPIES = 8


class NotReadError(Exception):
    """A term that the axioms say nothing of."""


class Reading:
    """Terms as expressions, where `*` stands for `lead` dims.

    A term is of the shapes that its operators say, at sizes that are numbers which nothing but
    equal sizes has in common.
    """

    def __init__(self, inputs: Sequence[Input], sizes: Mapping[str, Any], lead: int = 1) -> None:
        self._inputs = {own.name: z3.Const(f"input_{own.name}", T) for own in inputs}
        self._sizes, self._declared = sizes, {own.name: own.sizes for own in inputs}
        self._extents = {name: _some_number(name) for name in (*sizes, LEAD)}
        # The last one is the only one of which sizes say something.
        front = (*(_some_number(f"{LEAD}{i}") for i in range(1, lead)), self._extents[LEAD])
        self._shapes: dict[Arg, tuple[int, ...]] = {}
        self._dims: dict[str, Dims] = {}
        for own in inputs:
            known = (size for size in own.sizes if not isinstance(size, str))
            behind = tuple(size_in(size, self._extents, 1) for size in known)
            self._dims[own.name] = Dims((*front, *behind) if LEAD in own.sizes else behind)
        self._numbers: dict[object, int] = {}
        self.facts: list[Any] = []

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

    def shape(self, arg: Arg) -> tuple[int, ...]:
        """The shape of a term; raises `NotReadError` where it has none."""
        if not isinstance(arg, (Term, Name)):
            raise NotReadError(f"{arg} as a tensor")
        if arg not in self._shapes:
            try:
                (made,) = evaluate((arg,), Shapes(1), self._dims, self._extents)
            except (NotExpressed, InputError, *ARGUMENTS) as error:
                raise NotReadError(f"{arg}: {error}") from None
            self._shapes[arg] = made.shape
        return self._shapes[arg]

    def rank(self, arg: Arg) -> int:
        """The dims of a term."""
        return len(self.shape(arg))

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
        one, other = map(self.shape, term.args)
        if len(other) == 2:
            return self._mm(term)
        if len(one) < 3 or one[:-2] != other[:-2]:
            raise NotReadError("a product with a batch that only one side has")
        return FUNCTIONS["bmm"](*map(self.term, term.args))

    def _t(self, term: Term) -> Any:
        if self.rank(term.args[0]) != 2:
            raise NotReadError("what is no matrix transposed")
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
        x, made = term.args[0], self.shape(term)
        if len(made) != 1 or made[0] != prod(self.shape(x)):
            raise NotReadError("view")
        return self.term(x) if self.rank(x) == 1 else FUNCTIONS["flat"](self.term(x))

    def _add(self, term: Term) -> Any:
        one, other = term.args[:2]
        if isinstance(other, (int, float)):
            return FUNCTIONS["f"](self._number("add", other, *term.args[2:]), self.term(one))
        return self._pair(term, "add", "add_row", "add_channel")

    def _sub(self, term: Term) -> Any:
        if self.shape(term.args[0]) != self.shape(term.args[1]):
            raise NotReadError("sub of other dims")
        one, other = map(self.term, term.args)
        return FUNCTIONS["add"](one, FUNCTIONS["scale"](z3.RealVal(-1), other))

    def _mul(self, term: Term) -> Any:
        one, other = term.args
        if isinstance(other, (int, float)):
            return FUNCTIONS["scale"](_real(number(other)), self.term(one))
        if isinstance(other, Term) and other.op == "unsqueeze" and other.args[1] == -1:
            numbers = other.args[0]
            if self.shape(numbers) != self.shape(one)[-2:-1]:
                raise NotReadError("mul of other rows")
            return FUNCTIONS["mul_column"](self.term(one), self.term(numbers))
        if (column := self._column(other, self.shape(one))) is not None:
            by = "mul_column" if self.rank(one) == 2 else "mul_kernel"
            return FUNCTIONS[by](self.term(one), column)
        return self._pair(term, "mul", "mul_row", "mul_channel")

    def _column(self, arg: Arg, of: tuple[int, ...]) -> Any:
        """The row that is seen as numbers along the first dim of a shape; None where another is."""
        if not isinstance(arg, Term) or arg.op != "view" or len(of) < 2:
            return None
        x, shape = arg.args
        if not isinstance(shape, tuple) or self.shape(arg) != (of[0], *[1] * (len(of) - 1)):
            return None
        return self._view(Term("view", (x, shape[:1])))

    def _of_channels(self, arg: Arg, of: tuple[int, ...]) -> Any:
        """The row of an input of one number for each channel of a shape of three dims or more; None
        where it is another.
        """
        if not isinstance(arg, Name) or len(of) < 3:
            return None
        column = (of[1], *[1] * (len(of) - 2))
        if self.shape(arg) not in (column, (1, *column)):
            return None
        return FUNCTIONS["flat"](self.term(arg))

    def _div(self, term: Term) -> Any:
        one, other = term.args
        if not isinstance(other, (int, float)):
            raise NotReadError("div by a tensor")
        return FUNCTIONS["scale"](_real(1 / number(other)), self.term(one))

    def _pair(self, term: Term, alike: str, row: str, channel: str) -> Any:
        """Of equal shapes, or one of them a row, or numbers of channels, of the other."""
        if len(term.args) != 2:
            raise NotReadError(str(term))
        one, other = term.args
        shapes = self.shape(one), self.shape(other)
        if shapes[0] == shapes[1]:
            return FUNCTIONS[alike](self.term(one), self.term(other))
        for wide, narrow, shape in ((one, other, shapes[0]), (other, one, shapes[1])):
            if (numbers := self._of_channels(narrow, shape)) is not None:
                return FUNCTIONS[channel](self.term(wide), numbers)
            if self.shape(narrow) == shape[-1:]:
                return FUNCTIONS[row](self.term(wide), self.term(narrow))
        made = self.shape(term)
        return FUNCTIONS[alike](*(self._repeated(own, made) for own in term.args))

    def _repeated(self, arg: Arg, to: tuple[int, ...]) -> Any:
        """A tensor with dims of one element repeated as often as a shape says in numbers."""
        made, own = self.term(arg), self.shape(arg)
        if len(own) != len(to):
            raise NotReadError("what has fewer dims repeated along them")
        for at, (size, wanted) in enumerate(zip(own, to, strict=True)):
            if size != wanted:
                dim = self._dim(at - len(to), arg)
                if wanted > MOST_COPIES:
                    raise NotReadError("what is repeated as often as a size says")
                made = _joined(dim, [made] * wanted)
        return made

    def _cat(self, term: Term) -> Any:
        parts, at = _exactly(term, 2)
        assert isinstance(parts, tuple)
        dim = self._dim(at, parts[0])
        return _joined(dim, map(self.term, parts))

    def _split_with_sizes(self, term: Term) -> Any:
        x, told, at = _exactly(term, 3)
        assert isinstance(told, tuple)
        sizes = [own.size if isinstance(own, Extent) else _places(own) for own in told]
        extents = [extent(size, self._sizes) for size in sizes]
        index = term.result or 0
        begin = z3.simplify(z3.Sum(z3.IntVal(0), *extents[:index]))
        end = z3.simplify(begin + extents[index])
        return FUNCTIONS["cut"](self._dim(at, x), self.term(x), begin, end)

    def _softmax(self, term: Term) -> Any:
        x, at = _exactly(term, 2)
        return FUNCTIONS["rows"](self._number(term.op), self._dim(at, x), self.term(x))

    _log_softmax = _softmax

    def _sum(self, term: Term) -> Any:
        x, dims = _exactly(term, 2)
        return FUNCTIONS["total"](self._dim(_only(dims), x), self.term(x))

    def _mean(self, term: Term) -> Any:
        x, dims = _exactly(term, 2)
        return FUNCTIONS["scale"](self._inverse(x, self._dim(_only(dims), x)), self._sum(term))

    def _inverse(self, arg: Arg, dim: int) -> Any:
        """One over a size: that of a name, divided by how often the size is it."""
        whole = self.shape(arg)[dim]
        if whole <= MOST_COPIES:
            return _real(Fraction(1, whole))
        for name, one in self._extents.items():
            if name in self._sizes and whole % one == 0 and whole // one <= MOST_COPIES:
                inverse = FUNCTIONS["inverse"](self._sizes[name])
                return inverse * _real(Fraction(one, whole))
        return FUNCTIONS["inverse"](FUNCTIONS["dim"](self.term(arg), dim))

    def _conv1d(self, term: Term) -> Any:
        if self.rank(term.args[0]) != self.rank(term.args[1]):
            raise NotReadError("images without a batch")
        how = list(term.args[3:])
        key = 0 if not how else 1 + self._number(term.op, *how)
        name = "conv" if term.op == "conv1d" and how[3:] in ([], [1]) else "sums"
        made = FUNCTIONS[name](key, *map(self.term, term.args[:2]))
        return self._biased(made, term, "add_channel")

    _conv2d = _conv3d = _conv1d

    def _batch_norm(self, term: Term) -> Any:
        x, weight, bias, mean, variance, of_batch, _, eps = _exactly(term, 8)
        if of_batch is not False or mean is None or variance is None or self.rank(x) < 2:
            raise NotReadError("statistics of the batch")
        what = "row" if self.rank(x) == 2 else "channel"
        add, mul = FUNCTIONS[f"add_{what}"], FUNCTIONS[f"mul_{what}"]
        made = add(self.term(x), self.term(Term("neg", (mean,))))
        made = mul(made, self.term(Term("rsqrt", (Term("add", (variance, eps)),))))
        made = made if weight is None else mul(made, self.term(weight))
        return made if bias is None else add(made, self.term(bias))

    def _avg_pool1d(self, term: Term) -> Any:
        """Means of windows; what they are is said where there are as many as a number says."""
        x, how = self.term(term.args[0]), term.args[1:]
        made = FUNCTIONS["pool"](self._number(*how), x)
        size, stride = (_only(how[min(at, len(how) - 1)]) for at in (0, 1))
        count = self.shape(term)[-1]
        if len(how) < 3 and count <= MOST_COPIES and isinstance(size, int):
            assert isinstance(stride, int)
            begins = [stride * place for place in range(count)]
            self.facts.append(made == _joined(-1, (_mean_of(x, at, size) for at in begins)))
        return made

    def _embedding(self, term: Term) -> Any:
        return FUNCTIONS["look"](*map(self.term, term.args[:2]))


# Functions of elements of which the axioms know no more.
UNARY = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "exp", "clamp",
                   "rsqrt"})  # fmt: skip


def extent(size: Size, sizes: Mapping[str, Any]) -> Any:
    """A size as an expression."""
    blocks = [reduce(lambda a, b: a * b, (sizes[n] for n in b), z3.IntVal(1)) for b in size]
    return z3.simplify(reduce(lambda a, b: a + b, blocks))


def _joined(dim: int, parts: Iterable[Any]) -> Any:
    """Tensors one after the other."""
    return reduce(lambda a, b: FUNCTIONS["cat"](dim, a, b), parts)


def _mean_of(made: Any, begin: int, count: int) -> Any:
    """The mean of so many places of the last dim."""
    places = (FUNCTIONS["cut"](-1, made, at, at + 1) for at in range(begin, begin + count))
    return FUNCTIONS["scale"](_real(Fraction(1, count)), reduce(FUNCTIONS["add"], places))


def _places(arg: Arg) -> Size:
    """A number as a size."""
    if not isinstance(arg, int) or arg < 1:
        raise NotReadError(f"{arg} as a size")
    return ((),) * arg


def _exactly(term: Term, count: int) -> tuple[Arg, ...]:
    """So many arguments; raises `NotReadError`."""
    if len(term.args) != count:
        raise NotReadError(str(term))
    return term.args


def _only(dims: Arg) -> Arg:
    """The only one of a tuple; raises `NotReadError`."""
    if not isinstance(dims, tuple) or len(dims) != 1:
        raise NotReadError(f"{dims} for one dim")
    return dims[0]


def _some_number(name: str) -> int:
    """A large number for a size, which no sum or product of other sizes is but by chance."""
    return 2**40 + int.from_bytes(blake2b(name.encode(), digest_size=5).digest())


def _real(value: Fraction) -> Any:
    return z3.RealVal(f"{value.numerator}/{value.denominator}")
