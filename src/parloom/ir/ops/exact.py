"""What entries compute, in any algebra: for proofs of rewrites and for their counterexamples.

What an entry does not say is elementwise where its factors are the dims of the result: a function
of elements of which nothing more is known. An entry raises `NotImplementedError` for whatever torch
does not compute, and for arguments that it does not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from math import isfinite, prod
from typing import Any

from parloom.ir.ops.algebra import Algebra, Names, Size, Window, aligned

Results = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call, with tensors of an algebra in the place of values, and which of them
    were read.
    """

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    seen: set[int | str] = field(default_factory=set, compare=False, repr=False)

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """An argument by position or by name."""
        self.seen.add(position)
        return self.args[position] if position < len(self.args) else self.named(name, default)

    def named(self, name: str, default: Any = None) -> Any:
        """An argument that has no position."""
        self.seen.add(name)
        return dict(self.kwargs).get(name, default)

    def rest(self, begin: int) -> tuple[Any, ...]:
        """All from a position on."""
        self.seen.update(range(begin, len(self.args)))
        return self.args[begin:]

    @property
    def unread(self) -> list[str]:
        """What was given and not read, but for what is left out."""
        every = [*enumerate(self.args), *self.kwargs]
        return [f"{key}: {own}" for key, own in every if key not in self.seen and own is not None]


Exact = Callable[[Algebra[Any], Given], Results]


def of_all(exact: Exact) -> Exact:
    """The same, which refuses arguments that it did not read: what they ask for is not computed."""

    def checked(algebra: Algebra[Any], given: Given) -> Results:
        own = Given(given.args, given.kwargs)
        made = exact(algebra, own)
        if own.unread:
            raise NotImplementedError(f"arguments that are not read: {', '.join(own.unread)}")
        return made

    return checked


def names_of(algebra: Algebra[Any], part: Any) -> list[str]:
    """A name for each dim of a tensor."""
    return [f"d{i}" for i in range(len(algebra.dims(part)))]


def is_tensor(given: Any) -> bool:
    """Whether an argument is a tensor: none of the values that nodes have besides."""
    return not isinstance(given, (int, float, str, tuple, Fraction, type(None)))


def number(value: float) -> Fraction:
    """A number as it is written: 0.1 is a tenth. Raises `NotImplementedError` for one that is not
    finite, and for anything else.
    """
    if not isinstance(value, (int, float, Fraction)) or not isfinite(value):
        raise NotImplementedError(f"{value} for a number")
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


def dim_of(dim: Any, rank: int) -> int:
    """A dim counted from the first; raises `NotImplementedError` for one that there is not."""
    if type(dim) is not int or not -rank <= dim < rank:
        raise NotImplementedError(f"dim {dim} of {rank}")
    return dim % rank


def dims_of(dims: Any, rank: int) -> list[int]:
    """Some dims, or one; raises `NotImplementedError` for what is there twice."""
    found = [dim_of(dim, rank) for dim in (dims if isinstance(dims, tuple) else (dims,))]
    if len(set(found)) < len(found):
        raise NotImplementedError(f"dims {dims} of {rank}")
    return found


def has_dims(algebra: Algebra[Any], part: Any, *sizes: Size) -> Any:
    """A tensor of just these sizes; raises `NotImplementedError` for any other."""
    if not is_tensor(part) or tuple(algebra.dims(part)) != sizes:
        raise NotImplementedError(f"a tensor that is not of {sizes}")
    return part


def has_rank(algebra: Algebra[Any], part: Any, *ranks: int) -> Any:
    """A tensor of one of these ranks; raises `NotImplementedError` for any other."""
    if not is_tensor(part) or len(algebra.dims(part)) not in ranks:
        raise NotImplementedError(f"a tensor that is not of {ranks} dims")
    return part


def contracted(
    algebra: Algebra[Any], names: Sequence[Names], to: Names, parts: Sequence[Any]
) -> Any:
    """A product of which no dim is repeated along one of its name: all are of one size. Raises
    `NotImplementedError`.
    """
    sizes: dict[str, Size] = {}
    for own, part in zip(names, parts, strict=True):
        for name, size in zip(own, algebra.dims(has_rank(algebra, part, len(own))), strict=True):
            if sizes.setdefault(name, size) != size:
                raise NotImplementedError(f"{name} is {sizes[name]} and {size}")
    return algebra.product(names, to, parts)


def spread(algebra: Algebra[Any], parts: Sequence[Any]) -> list[Any]:
    """Tensors with all dims of all, aligned from the right."""
    if len(parts) == 1:
        return list(parts)
    zeros = [algebra.scale(part, Fraction(0)) for part in parts]
    return [algebra.add(part, reduce(algebra.add, zeros)) for part in parts]


# Products.


def product(*operands: str, to: str) -> Exact:
    """A product whose operands have dims of these names: `product("m k", "k n", to="m n")`."""
    names = [operand.split() for operand in operands]

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        parts = [given.arg(i) for i in range(len(names))]
        return (contracted(algebra, names, to.split(), parts),)

    return exact


def linear(algebra: Algebra[Any], given: Given) -> Results:
    """`x[.., k] w[n, k] + b[n]`."""
    x, weight, bias = given.arg(0), given.arg(1), given.arg(2, "bias")
    lead = names_of(algebra, x)[:-1]
    made = contracted(algebra, [[*lead, "k"], ["n", "k"]], [*lead, "n"], [x, weight])
    if bias is None:
        return (made,)
    return (algebra.add(made, has_dims(algebra, bias, algebra.dims(weight)[0])),)


def linears(algebra: Algebra[Any], given: Given) -> Results:
    """One operand times several weights, each with its bias."""
    weights = given.arg(1)
    biases = given.arg(2) or (None,) * len(weights)
    each = (Given((given.arg(0), *pair)) for pair in zip(weights, biases, strict=True))
    return tuple(linear(algebra, one)[0] for one in each)


def convolutions(algebra: Algebra[Any], given: Given) -> Results:
    """One operand with several kernels, each with its bias."""
    kernels, settings = given.arg(1), given.rest(3)
    biases = given.arg(2) or (None,) * len(kernels)
    exact = convolution(len(algebra.dims(kernels[0])) - 2)
    each = (Given((given.arg(0), *pair, *settings)) for pair in zip(kernels, biases, strict=True))
    return tuple(exact(algebra, one)[0] for one in each)


def matmul(algebra: Algebra[Any], given: Given) -> Results:
    """Matrices, vectors, or batches of them."""
    parts = given.arg(0), given.arg(1)
    sizes = [algebra.dims(part) for part in parts]
    left, right = map(len, sizes)
    if 0 in (left, right) or sizes[0][-1] != sizes[1][-min(right, 2)]:
        raise NotImplementedError(f"a product of {sizes[0]} and {sizes[1]}")
    rank = max(left, right, 2) - 2
    batch = [f"b{i}" for i in range(rank)]
    one = ["k"] if left == 1 else [*batch[rank - left + 2 :], "m", "k"]
    other = ["k"] if right == 1 else [*batch[rank - right + 2 :], "k", "n"]
    to = [*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else [])]
    return (algebra.product([one, other], to, parts),)


def add_product(exact: Exact) -> Exact:
    """`addend * beta + left right * alpha`."""

    def found(algebra: Algebra[Any], given: Given) -> Results:
        alpha, beta = (number(given.named(name, 1)) for name in ("alpha", "beta"))
        (made,) = exact(algebra, Given(given.rest(1)))
        found = algebra.add(algebra.scale(made, alpha), algebra.scale(given.arg(0), beta))
        return (has_dims(algebra, found, *algebra.dims(made)),)

    return found


def einsum(algebra: Algebra[Any], given: Given) -> Results:
    """`einsum("ij,jk->ik", (a, b))`, of letters alone, each once in an operand, and with what it
    gives. Raises `NotImplementedError` for anything else.
    """
    text = given.arg(0).replace(" ", "")
    before, arrow, to = text.partition("->")
    operands = before.split(",")
    parts = given.arg(1) if isinstance(given.arg(1), tuple) else given.rest(1)
    letters = set(before) - {","}
    if not arrow or not "".join(letters | set(to)).isalpha() or not set(to) <= letters:
        raise NotImplementedError(f"einsum of {text}")
    if any(len(set(own)) < len(own) for own in (*operands, to)) or len(operands) != len(parts):
        raise NotImplementedError(f"einsum of {text}")
    for own, part in zip(operands, parts, strict=True):
        has_rank(algebra, part, len(own))
    return (algebra.product([list(own) for own in operands], list(to), parts),)


def normalize(name: str, position: int) -> Exact:
    """Rows of the last dim normalized, times a weight at `position`, and a bias behind it."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        x, shape = given.arg(0), given.arg(1)
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise NotImplementedError("several dims")
        size = size_of(algebra, shape[0])
        has_dims(algebra, x, *algebra.dims(x)[:-1], size)
        eps = given.arg(position + 2 if name == "layer_norm" else position + 1, "eps")
        made = algebra.rows(f"{name} {eps}", x, len(algebra.dims(x)) - 1)
        weight, bias = given.arg(position, "weight"), given.arg(position + 1, "bias")
        given.arg(position + 3)  # whether a library computes it
        if weight is not None:
            (made,) = multiply(algebra, Given((made, has_dims(algebra, weight, size))))
        if name == "layer_norm" and bias is not None:
            made = algebra.add(made, has_dims(algebra, bias, size))
        return (made,)

    return exact


def batch_norm(algebra: Algebra[Any], given: Given) -> Results:
    """Channels less a mean that is given, times the inverse root of a variance; times a weight, and
    a bias behind it. Raises `NotImplementedError` for means of the batch itself.
    """
    x, weight, bias, mean, variance, of_batch, _, eps, _ = (given.arg(i) for i in range(9))
    if of_batch or mean is None or variance is None:
        raise NotImplementedError("statistics of the batch")
    names = names_of(algebra, x)
    for row in (mean, variance, weight, bias):
        if row is not None:
            has_dims(algebra, row, *algebra.dims(x)[1:2])

    def column(row: Any) -> Any:
        return algebra.reshape(row, [*algebra.dims(row), *[algebra.one] * (len(names) - 2)])

    (spread_out,) = combine(1)(algebra, Given((variance, eps)))
    (scale,) = elementwise("rsqrt")(algebra, Given((spread_out,)))
    centred = algebra.add(x, algebra.scale(column(mean), Fraction(-1)))
    made = algebra.product([names, [names[1]]], names, [centred, scale])
    if weight is not None:
        made = algebra.product([names, [names[1]]], names, [made, weight])
    return (made if bias is None else algebra.add(made, column(bias)),)


def convolution(spatial: int) -> Exact:
    """Windows of places times kernels, of channels in groups."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        x = has_rank(algebra, given.arg(0), spatial + 1, spatial + 2)
        weight, bias = has_rank(algebra, given.arg(1), spatial + 2), given.arg(2, "bias")
        lead = ["b"] * (len(algebra.dims(x)) - spatial - 1)
        kernel = [algebra.count(size) for size in algebra.dims(weight)[2:]]
        stride, dilation = _each(given.arg(3, "stride", 1), spatial), _dilation(given, 5, spatial)
        padding = given.arg(4, "padding", 0)
        if padding == "same" and set(stride) != {1}:
            raise NotImplementedError("as many places by strides")
        x = _windows(algebra, x, kernel, stride, zeros(padding, kernel, dilation), dilation)
        groups = size_of(algebra, given.arg(6, "groups", 1))
        places = [f"{what}{i}" for i in range(spatial) for what in "pr"]
        inner = [f"r{i}" for i in range(spatial)]
        to = [*lead, "g", "o", *(f"p{i}" for i in range(spatial))]
        parts = [algebra.apart(x, len(lead), groups), algebra.apart(weight, 0, groups)]
        made = contracted(algebra, [[*lead, "g", "c", *places], ["g", "o", "c", *inner]], to, parts)
        batch, out = algebra.dims(made)[: len(lead)], algebra.dims(made)[len(lead) + 2 :]
        made = algebra.reshape(made, [*batch, algebra.dims(weight)[0], *out])
        if bias is None:
            return (made,)
        has_dims(algebra, bias, algebra.dims(weight)[0])
        ones = [algebra.fill(Fraction(1), [algebra.one] * spatial)]
        wide = algebra.product([["o"], inner], ["o", *inner], [bias, *ones])
        return (algebra.add(made, wide),)

    return exact


def pool(name: str, spatial: int, *, mean: bool) -> Exact:
    """Means of windows, or a function of their elements."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        x = has_rank(algebra, given.arg(0), spatial + 1, spatial + 2)
        size = _each(given.arg(1, "kernel_size"), spatial)
        stride = _each(given.arg(2, "stride") or size, spatial)
        dilation = (1,) * spatial if mean else _dilation(given, 4, spatial)
        pads = zeros(_each(given.arg(3, "padding", 0), spatial, 0), size, dilation)
        if any(2 * n > (k - 1) * d + 1 for (n, _), k, d in zip(pads, size, dilation, strict=True)):
            raise NotImplementedError("windows of zeros alone")
        others = (
            [given.arg(4, "ceil_mode", False), not given.arg(5, "count_include_pad", True)]
            if mean
            else [given.arg(5, "ceil_mode", False)]
        )
        if any(others) or (mean and given.arg(6, "divisor_override") is not None):
            raise NotImplementedError("windows that are cut off, or means of fewer places")

        def moved(part: Any) -> Any:
            return _windows(algebra, part, size, stride, pads, dilation)

        if mean:
            wide = moved(x)
            lead = len(algebra.dims(x)) - spatial
            names = names_of(algebra, wide)
            kept = [*names[:lead], *names[lead::2]]
            made = algebra.product([names], kept, [wide])
            return (algebra.scale(made, Fraction(1, prod(size))),)
        parts = _places(algebra, moved(x), size)
        if any(before or after for before, after in pads):  # places outside do not count
            ones = algebra.fill(Fraction(1), algebra.dims(x))
            parts += _places(algebra, moved(ones), size)
            return (algebra.opaque(f"{name} of those inside", *parts),)
        return (algebra.opaque(name, *parts),)

    return exact


def pool_to_one(spatial: int) -> Exact:
    """The mean of an image, which adaptive means are where they are one."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        if set(_each(given.arg(1, "output_size"), spatial)) != {1}:
            raise NotImplementedError("windows of sizes that differ")
        has_rank(algebra, given.arg(0), spatial + 1, spatial + 2)
        dims = tuple(range(-spatial, 0))
        return total(mean=True)(algebra, Given((given.arg(0), dims, True)))

    return exact


def zeros(
    padding: Any, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Zeros before and after each spatial dim, by numbers or by name: the odd one of `same` is
    after. Raises `NotImplementedError`.
    """
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((n // 2, n - n // 2) for n in both)
    if isinstance(padding, str) and padding != "valid":
        raise NotImplementedError(f"padding {padding}")
    return tuple((n, n) for n in _each(0 if padding == "valid" else padding, len(kernel), 0))


def _windows(
    algebra: Algebra[Any],
    part: Any,
    size: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Any:
    """Windows over the last dims, each with its places behind it."""
    lead = len(algebra.dims(part)) - len(size)
    for i in reversed(range(len(size))):
        window = Window(size[i], stride[i], *pads[i], dilation[i])
        part = algebra.windows(part, lead + i, window)
    return part


def _places(algebra: Algebra[Any], part: Any, size: Sequence[int]) -> list[Any]:
    """The places of windows of a size, each as a tensor of its own."""
    parts, sizes = [part], algebra.dims(part)
    lead = len(sizes) - 2 * len(size)
    for i, count in enumerate(size):
        single = [algebra.number(1)] * count
        parts = [own for part in parts for own in algebra.split(part, lead + 2 * i + 1, single)]
    kept = [*sizes[:lead], *sizes[lead::2]]
    return [algebra.reshape(part, kept) for part in parts]


def _dilation(given: Given, position: int, spatial: int) -> tuple[int, ...]:
    return _each(given.arg(position, "dilation", 1), spatial)


# Sums of elements.


def combine(sign: int) -> Exact:
    """`one + alpha * other`, or minus."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        alpha = number(given.named("alpha", 1)) * sign
        parts = [_tensor(algebra, given.arg(i)) for i in range(2)]
        return (algebra.add(parts[0], algebra.scale(parts[1], alpha)),)

    return exact


def multiply(algebra: Algebra[Any], given: Given) -> Results:
    """Elements, or a number times elements."""
    one, other = given.arg(0), given.arg(1)
    if not is_tensor(one):
        return (algebra.scale(other, number(one)),)
    if not is_tensor(other):
        return (algebra.scale(one, number(other)),)
    own, names = aligned(*(len(algebra.dims(part)) for part in (one, other)))
    return (algebra.product(own, names, [one, other]),)


def divide(algebra: Algebra[Any], given: Given) -> Results:
    """By a number; by a tensor it is a function of elements."""
    if is_tensor(given.arg(1)) or given.kwargs:
        if len(given.args) > 2:  # how it is rounded has a name
            raise NotImplementedError("div of three tensors")
        return elementwise("div")(algebra, given)
    by = number(given.arg(1))
    if by == 0:
        raise NotImplementedError("div by zero")
    return (algebra.scale(given.arg(0), 1 / by),)


def square(algebra: Algebra[Any], given: Given) -> Results:
    """The elements by themselves."""
    return multiply(algebra, Given((given.arg(0), given.arg(0))))


def negate(algebra: Algebra[Any], given: Given) -> Results:
    """Minus the elements."""
    return (algebra.scale(given.arg(0), Fraction(-1)),)


def same(algebra: Algebra[Any], given: Given) -> Results:
    """The operand itself."""
    return (given.arg(0),)


def total(mean: bool) -> Exact:
    """`sum(x, dims, keepdim)`, or the mean."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        x = given.arg(0)
        names, sizes = names_of(algebra, x), algebra.dims(x)
        asked = given.arg(1, "dim")
        every = asked is None or asked == ()
        gone = set(range(len(names)) if every else dims_of(asked, len(names)))
        kept = [name for i, name in enumerate(names) if i not in gone]
        made = algebra.product([names], kept, [x])
        for i in sorted(gone) if mean else ():
            made = algebra.divide(made, sizes[i])
        if given.arg(2, "keepdim", False):
            shape = [algebra.one if i in gone else size for i, size in enumerate(sizes)]
            made = algebra.reshape(made, shape)
        return (made,)

    return exact


# Functions of which nothing is known.


def elementwise(name: str) -> Exact:
    """A function of elements; its other arguments are part of its name."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        args, kwargs = given.rest(0), tuple((n, given.named(n)) for n, _ in given.kwargs)
        parts = [own for own in args if is_tensor(own)]
        if not parts:
            raise NotImplementedError(f"{name} of no tensor")
        others = tuple("" if is_tensor(own) else own for own in args), kwargs
        return (algebra.opaque(f"{name}{others}", *spread(algebra, parts)),)

    return exact


def along(name: str) -> Exact:
    """A function of all elements along a dim, as softmax is."""

    def exact(algebra: Algebra[Any], given: Given) -> Results:
        x = given.arg(0)
        return (algebra.rows(name, x, dim_of(given.arg(1, "dim"), len(algebra.dims(x)))),)

    return exact


def _tensor(algebra: Algebra[Any], given: Any) -> Any:
    return given if is_tensor(given) else algebra.fill(number(given), [])


def size_of(algebra: Algebra[Any], given: Any) -> Size:
    """A size that is told, or that is a number."""
    return algebra.number(given) if isinstance(given, int) else given


def _each(given: Any, spatial: int, least: int = 1) -> tuple[int, ...]:
    """One number for each spatial dim; raises `NotImplementedError`."""
    values = given if isinstance(given, tuple) else (given,)
    if len(values) not in (1, spatial) or any(type(n) is not int or n < least for n in values):
        raise NotImplementedError(f"{given} for {spatial} dims")
    return values if len(values) == spatial else values * spatial
