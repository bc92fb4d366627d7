"""Rules that move parallel operators through others, from the factors of those (Unity, OSDI'22,
section 4, has them generated at degree 2; these are for any degree).

Of a factor of an operator, operands that have it are cut along it, operands that lack it are
copied, a result that has it comes in parts, and a result that lacks it in partial sums. So are
copies moved, and parts that are put together; sums move through operators that are linear, which
the proof says. All of these are candidates: `parallel_rules` keeps those that normal forms prove,
and `inverse_rules` and `exchanged` are the same of the parallel operators among themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from parloom.errors import InputError
from parloom.ir.graph import Arg as NodeArg
from parloom.ir.graph import Node, Ref, TensorSpec, Value
from parloom.ir.ops import OPS, Site
from parloom.rewrite.parallel import COMBINE, LINEAR, PARTITION, REDUCE, REPLICATE
from parloom.rewrite.rules import Rule, prove
from parloom.rewrite.shapes import Dims, Shapes
from parloom.rewrite.terms import (
    Arg,
    Extent,
    Input,
    Name,
    Size,
    Term,
    evaluate,
    extents_of,
    parse_inputs,
    parse_term,
    size_in,
)

DEGREE = "degree"
K: Size = ((DEGREE,),)
ONE: Size = ((),)
TWO: Size = ((), ())
EXTENTS = (2, 3, 5, 7, 11, 13, 17, 19)
# What an operator is on pieces, where that is not the operator itself with all dims in front.
ON_PIECES = {"linear": LINEAR}


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of one operator on tensors of one device; dims that it is told count from the last."""

    inputs: tuple[Input, ...]
    call: Term


@dataclass(frozen=True, slots=True)
class Slots:
    """The factor of each dim of a parallel operand or result, the replica dim first.

    The replica dim of a tensor that lacks a factor is for that factor. Where no tensor lacks any
    (`alike`), the first dim of all is the replica dim, a dim as others are.
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    plain: tuple[str, ...]
    alike: bool


def operation(inputs: str, call: str) -> Operation:
    """An operation from text: `operation("x[b, k], w[n, k]", "linear(x, w)")`."""
    declared = parse_inputs(inputs)
    found = parse_term(call, declared)
    if not isinstance(found, Term):
        raise InputError(f"{call!r} calls nothing")
    return Operation(declared, found)


def slots(own: Operation) -> Slots:
    """The factors of an operation; raises `InputError` where tensors lack several."""
    sizes = dict(zip(extents_of(own.inputs), EXTENTS, strict=False))
    specs = {
        o.name: TensorSpec(
            tuple(size_in(s, sizes, 1) for s in o.sizes if not isinstance(s, str)), "float32"
        )
        for o in own.inputs
    }
    shapes = {name: Dims(spec.shape) for name, spec in specs.items()}
    numbers = range(_results(own.call))
    made = evaluate([replace(own.call, result=i) for i in numbers], Shapes(1), shapes, sizes)
    results = tuple(
        Value(f"out{i}", TensorSpec(one.shape, "float32")) for i, one in enumerate(made)
    )

    def read(arg: Arg) -> NodeArg:
        if isinstance(arg, Name):
            return Ref(arg.name)
        if isinstance(arg, Extent):
            return int(size_in(arg.size, sizes, 1))
        assert not isinstance(arg, Term)
        return tuple(map(read, arg)) if isinstance(arg, tuple) else arg

    node = Node(own.call.op, tuple(map(read, own.call.args)), (), results)
    found = OPS[own.call.op].rule(Site(node, tuple(specs[name] for name in node.refs)))
    plain = tuple(f for f, _ in found.sizes if found.kind(f) == "plain")

    own_factors = [
        [tuple(dim[0] if len(dim) == 1 else "" for dim in dims) for dims in some]
        for some in (found.operands, found.results)
    ]
    missing = [[[f for f in plain if f not in dims] for dims in some] for some in own_factors]
    if not any(any(some) for some in missing):
        operands, made_of = (tuple(some) for some in own_factors)
        return Slots(operands, made_of, plain, alike=True)
    if any(len(each) != 1 for some in missing for each in some):
        raise InputError(f"{own.call} has tensors that do not lack one factor each")
    operands, made_of = (
        tuple((lacks[0], *dims) for lacks, dims in zip(*both, strict=True))
        for both in zip(missing, own_factors, strict=True)
    )
    return Slots(operands, made_of, plain, alike=False)


def parallel_rules(own: Operation) -> list[Rule]:
    """The rules of an operation that normal forms prove, for each of its plain factors."""
    return [found for found in candidates(own) if not prove(found)]


def joined_rules(own: Operation) -> list[Rule]:
    """The rules of an operation on one device that its factors say, and normal forms prove: of
    operands that are put together along a factor, and of operands that are sums (many of TASO's
    rules, SOSP'19, are of these two kinds).
    """
    of, found = slots(own), list[Rule]()
    for factor in of.plain:
        found += _Maker(own, of, factor, pieces=False).together()
    for marked in product((False, True), repeat=len(own.inputs)):
        if any(marked):
            found += _Maker(own, of, "", pieces=False).added(marked)
    return [rule for rule in found if not prove(rule)]


def candidates(own: Operation) -> Iterator[Rule]:
    """What the factors of an operation say of parallel operators, unproved where it is of sums."""
    of = slots(own)
    for factor in of.plain:
        maker = _Maker(own, of, factor)
        yield from maker.moved(PARTITION)
        yield from maker.moved(REPLICATE)
        yield from maker.together()
        subsets = product((False, True), repeat=len(own.inputs))
        for marked in (subset for subset in subsets if any(subset)):
            yield from maker.combined(marked)
            yield from maker.summed(marked, spread=True)
            yield from maker.summed(marked, spread=False)


def inverse_rules(rank: int) -> Iterator[Rule]:
    """Rules of parallel operators of one dim, of tensors of a rank that counts the replica dim.

    A partition and its combination; a sum of chunks that are on devices or on one; two copies that
    are summed; two tensors that are summed where they were put together.
    """
    for d in range(rank):
        x = _general(rank)
        cut = _times(x, rank + d)
        spread = _times(x, d, last=True)
        local = _with(cut, d, ONE)
        parted = _call(PARTITION, Name("x"), d)
        yield _rule("combine partition", [cut], _call(COMBINE, parted, d), Name("x"))
        combined = _call(COMBINE, Name("x"), d)
        yield _rule("partition combine", [spread], _call(PARTITION, combined, d), Name("x"))
        whole = _call(REDUCE, Name("x"), d)
        yield _rule("reduce partition", [local], _call(REDUCE, parted, d), whole)
        twice = [_call(REDUCE, _call(REPLICATE, Name("x"), e), e) for e in (0, d)]
        if d:
            yield _rule("reduce replicate", [x], *twice)
        alone = _with(x, d, ONE)
        two = replace(alone, name="y")
        joined = Term("cat", ((Name("x"), Name("y")), d - rank))
        added = Term("add", (Name("x"), Name("y")))
        yield _rule("reduce cat", [alone, two], _call(REDUCE, joined, d, TWO), added)
        copies = _call(REDUCE, _call(REPLICATE, Name("x"), d, TWO), d, TWO)
        yield _rule("reduce two", [x], copies, Term("add", (Name("x"), Name("x"))))
        wide = _with(two, rank + d, (("q",),))
        sizes = (Extent(((f"p{d}",),)), Extent((("q",),)))
        for i, name in enumerate("xy"):
            parts = Term("split_with_sizes", (joined, sizes, d - rank), i)
            yield _rule("split cat", [alone, wide], parts, Name(name))


def exchanged(rank: int) -> Iterator[Rule]:
    """Pairs of parallel operators that commute, of any shapes for which they are proved to."""
    ops = list(product((PARTITION, COMBINE, REPLICATE, REDUCE), range(rank)))
    for i, (one, d) in enumerate(ops):
        for other, e in ops[i + 1 :]:
            yield from _exchanged(rank, (one, d), (other, e))


def _exchanged(rank: int, first: tuple[str, int], second: tuple[str, int]) -> Iterator[Rule]:
    """Two parallel operators in either order, where that is proved."""
    found: list[Rule] = []
    for needs in product(*(_needs(*own) for own in (first, second))):
        x = _general(rank)
        for at, last, alone in (need for some in needs for need in some):
            x = _with(x, at, ONE) if alone else _times(x, at, last=last)
        one = _call(first[0], _call(second[0], Name("x"), second[1]), first[1])
        other = _call(second[0], _call(first[0], Name("x"), first[1]), second[1])
        rule = _rule(f"{first[0]} {second[0]}", [x], one, other)
        if not prove(rule):
            found.append(rule)
    yield from found


def _needs(op: str, d: int) -> list[list[tuple[int, bool, bool]]]:
    """Factors that shapes need: of each variant, (dim, whether the degree is last, whether the dim
    is of one device); dims of pieces are `-d - 1`.
    """
    if op == PARTITION:
        return [[(-d - 1, False, False)]]
    if op == COMBINE:
        return [[(d, True, False)]]
    if op == REDUCE:
        return [[(d, False, False)], [(d, False, True), (-d - 1, False, False)]]
    return [[]]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Rules of one factor of an operation."""

    own: Operation
    of: Slots
    factor: str
    pieces: bool = True  # or whole tensors, on one device

    def moved(self, op: str) -> Iterator[Rule]:
        """Parts, or copies, of all operands, and of the result."""
        inputs = list(self._inputs(cut=op == PARTITION))
        parts = {
            own.name: self._on(op if self._has(i) else REPLICATE, Name(own.name), i)
            for i, own in enumerate(self.own.inputs)
            if self._at(i) is not None
        }
        sides = []
        for result, of in enumerate(self.of.results):
            left, right = self._call(parts, result), self._call({}, result)
            at = _index(of, self.factor)
            if self._summed(at):
                if op == REPLICATE:
                    return  # copies of what is summed are summed
                left = _call(REDUCE, left, 0)
            elif at is not None:
                right = _call(op, right, at)
            sides.append((left, right))
        yield _rule(f"{op} {self.own.call.op}", inputs, *zip(*sides, strict=True))

    def combined(self, marked: Sequence[bool]) -> Iterator[Rule]:
        """Combinations of `marked` operands, and of the result; the others are cut, or copied."""
        inputs, before, after = list(self._inputs(cut=True)), dict[str, Arg](), dict[str, Arg]()
        for i, own in enumerate(self.own.inputs):
            at, general = self._at(i), list(self._inputs())[i]
            if at is None:
                return
            if marked[i]:
                alone = general if self.of.alike else _with(general, at, ONE)
                inputs[i] = _times(alone, at, last=True)
                before[own.name] = _call(COMBINE, Name(own.name), at)
            else:
                after[own.name] = self._on(
                    PARTITION if self._has(i) else REPLICATE, Name(own.name), i
                )
        sides = []
        for result, of in enumerate(self.of.results):
            to, made = _index(of, self.factor), self._call(after, result)
            if to is None:
                return
            whole = _call(REDUCE, made, 0) if self._summed(to) else _call(COMBINE, made, to)
            sides.append((self._call(before, result), whole))
        yield _rule(f"combine {self.own.call.op}", inputs, *zip(*sides, strict=True))

    def summed(self, marked: Sequence[bool], *, spread: bool) -> Iterator[Rule]:
        """Sums of `marked` operands, of chunks on devices or of those on one."""
        inputs, sums, others = list(self._inputs()), dict[str, Arg](), dict[str, Arg]()
        for i, own in enumerate(self.own.inputs):
            at, pieces = self._at(i), len(inputs[i].sizes) // 2
            if at is None or (marked[i] and not spread and not self._has(i)):
                return
            if marked[i]:
                inputs[i] = _times(inputs[i], at if spread else pieces + at)
                sums[own.name] = _call(REDUCE, Name(own.name), at)
            elif spread:
                others[own.name] = _call(REPLICATE, Name(own.name), at)
            elif self._has(i):
                return
            inputs[i] = inputs[i] if spread else _with(inputs[i], at, ONE)
        sides = []
        for result, of in enumerate(self.of.results):
            to = _index(of, self.factor)
            if to is None or self._summed(to):
                return
            whole = _call(REDUCE, self._call(others, result), to)
            sides.append((self._call(sums, result), whole))
        yield _rule(f"reduce {self.own.call.op}", inputs, *zip(*sides, strict=True))

    def together(self) -> Iterator[Rule]:
        """Operands that are put together along the factor, and the results of each."""
        inputs, joined, second = list(self._inputs()), dict[str, Arg](), dict[str, Arg]()
        for i, own in enumerate(self.own.inputs):
            at, rank = self._at(i), len(self.of.operands[i])
            if at is None:
                return
            if self._has(i):
                size = inputs[i].sizes[at - rank]
                other = tuple(tuple(f"{n}_1" for n in block) for block in size)
                more = _with(inputs[i], at - rank, other)
                inputs.append(replace(more, name=f"{own.name}_1"))
                second[own.name] = Name(f"{own.name}_1")
                joined[own.name] = Term("cat", ((Name(own.name), second[own.name]), at - rank))
        sides = []
        for result, of in enumerate(self.of.results):
            to = _index(of, self.factor)
            each = self._call({}, result), self._call(second, result)
            if to is None:
                return
            whole = Term("add", each) if self._summed(to) else Term("cat", (each, to - len(of)))
            sides.append((self._call(joined, result), whole))
        yield _rule(f"cat {self.own.call.op}", inputs, *zip(*sides, strict=True))

    def added(self, marked: Sequence[bool]) -> Iterator[Rule]:
        """Sums of two in the place of `marked` operands, and of the results of each."""
        inputs, sums, second = list(self._inputs()), dict[str, Arg](), dict[str, Arg]()
        for own, is_sum in zip(tuple(inputs), marked, strict=True):
            if is_sum:
                inputs.append(replace(own, name=f"{own.name}_1"))
                second[own.name] = Name(f"{own.name}_1")
                sums[own.name] = Term("add", (Name(own.name), second[own.name]))
        sides = [
            (
                self._call(sums, result),
                Term("add", (self._call({}, result), self._call(second, result))),
            )
            for result in range(len(self.of.results))
        ]
        yield _rule(f"add {self.own.call.op}", inputs, *zip(*sides, strict=True))

    def _at(self, operand: int) -> int | None:
        return _index(self.of.operands[operand], self.factor)

    def _has(self, operand: int) -> bool:
        """Whether the factor is one of the operand's own dims."""
        return self._at(operand) != 0 or self.of.alike

    def _summed(self, at: int | None) -> bool:
        """Whether a result lacks the factor, so that it is a sum over it."""
        return at == 0 and not self.of.alike

    def _on(self, op: str, arg: Arg, operand: int) -> Term:
        at = self._at(operand)
        assert at is not None
        return _call(op, arg, at)

    def _inputs(self, *, cut: bool = False) -> Iterator[Input]:
        """Operands as parallel tensors of any devices; where the factor is `cut`, pieces of it are
        multiples of the degree.
        """
        for i, own in enumerate(self.own.inputs):
            if not self.pieces:
                yield own
                continue
            names = self.of.operands[i]
            devices = tuple(((f"e_{f}",),) if f in self.of.plain else ONE for f in names)
            copies = () if self.of.alike else (ONE,)
            found = Input(own.name, (*devices, *copies, *own.sizes))
            at = self._at(i)
            if cut and at is not None:
                found = _times(found, len(names) + at) if self._has(i) else found
                # Copies are put before those that there are, parts within: one of them is alone.
                found = found if self.of.alike else _with(found, at, ONE)
            yield found

    def _call(self, operands: Mapping[str, Arg], result: int) -> Term:
        """The call on pieces, of other operands."""

        def other(arg: Arg) -> Arg:
            if isinstance(arg, Name):
                return operands.get(arg.name, arg)
            return tuple(map(other, arg)) if isinstance(arg, tuple) else arg

        call = self.own.call
        number = result if _results(call) > 1 else None
        op = ON_PIECES.get(call.op, call.op) if self.pieces else call.op
        return Term(op, tuple(map(other, call.args)), number)


def _results(call: Term) -> int:
    """How many tensors a call makes."""
    sizes = call.args[1] if call.op == "split_with_sizes" else ()
    return len(sizes) if isinstance(sizes, tuple) and sizes else 1


def _index(names: Sequence[str], factor: str) -> int | None:
    return names.index(factor) if factor in names else None


def _call(op: str, arg: Arg, d: int, k: Size = K) -> Term:
    return Term(op, (arg, d, Extent(k)))


def _rule(name: str, inputs: Sequence[Input], left: object, right: object) -> Rule:
    """A rule of one output or several; its id says both sides."""
    sides = [own if isinstance(own, tuple) else (own,) for own in (left, right)]
    text = " = ".join("; ".join(map(str, side)) for side in sides)
    shapes = ", ".join(map(str, inputs))
    return Rule(f"{name}: {text} of {shapes}", tuple(inputs), *sides)


def _general(rank: int) -> Input:
    """A parallel tensor `x` of any shape."""
    devices, pieces = ([((f"{name}{i}",),) for i in range(rank)] for name in "dp")
    return Input("x", (*devices, *pieces))


def _with(own: Input, at: int, size: Size) -> Input:
    """An input with another size."""
    sizes = list(own.sizes)
    sizes[at] = size
    return replace(own, sizes=tuple(sizes))


def _times(own: Input, at: int, *, last: bool = False) -> Input:
    """An input with the degree times a size: the degree first, unless it is `last`."""
    if at < 0:  # a dim of pieces, by its number
        at = len(own.sizes) // 2 - 1 - at
    size = own.sizes[at]
    assert not isinstance(size, str)
    return _with(own, at, tuple((*b, DEGREE) if last else (DEGREE, *b) for b in size))
