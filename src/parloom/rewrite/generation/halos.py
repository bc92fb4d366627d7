"""The second proof of rules that put results of windows together (`partial.py`).

A part of the results is that of the places of the operand that they read: windows reach so much
further than the part. What is padded lies between zeros, or what else its padding is, and parts of
it are those of what they lie in. Each part of one side is compared with that of the other one by
Z3, which is given cases of axioms without quantifiers: all that move a part inwards.
"""

from collections.abc import Callable, Iterator
from typing import Any

import z3

from parloom.rewrite.generation.axioms import RLIMIT
from parloom.rewrite.generation.equations import FUNCTIONS
from parloom.rewrite.generation.reading import NotReadError, Reading
from parloom.rewrite.rules import Rule
from parloom.rewrite.terms import LEAD, Arg, Name, Size, Term

# A part of what a function makes, and its cases; each is an equation with its condition.
CASES = {
    "near": ("cut(-1, near(i, j, a, b), s, e) == near(i, j, cut(-1, a, s, e + j), b)"
             " if And(0 <= s, s < e, e + j <= dim(a, -1))",),
    "add_channel": ("cut(-1, add_channel(a, v), s, e) == add_channel(cut(-1, a, s, e), v)",),
    "cut": ("cut(-1, cut(-1, a, i, j), s, e) == cut(-1, a, s + i, e + i)"
            " if And(0 <= i, 0 <= s, s <= e, e + i <= j)",),
    "cat": ("cut(-1, cat(-1, a, b), s, e) == cut(-1, a, s, e) if e <= dim(a, -1)",
            "cut(-1, cat(-1, a, b), s, e) == cut(-1, b, s - dim(a, -1), e - dim(a, -1))"
            " if s >= dim(a, -1)",
            "cut(-1, cat(-1, a, b), s, e) =="
            " cat(-1, cut(-1, a, s, dim(a, -1)), cut(-1, b, 0, e - dim(a, -1)))"
            " if And(0 <= s, s < dim(a, -1), dim(a, -1) < e)"),
}  # fmt: skip
WHOLE = "cut(-1, a, s, e) == a if And(s == 0, e == dim(a, -1))"
# The arguments of functions by the names that cases have for them.
NAMES = {"near": "ijab", "add_channel": "av", "cut": "_aij", "cat": "_ab"}


def prove_by_halos(rule: Rule, rlimit: int = RLIMIT) -> str:
    """Empty where Z3 proves a rule; why not, otherwise."""
    sizes = {name: z3.Int(f"size_{name}") for name in rule.extents}
    reading = Halos(rule, sizes)
    try:
        for left, right in zip(rule.left, rule.right, strict=True):
            for goal in reading.goals(reading.term(left), reading.term(right)):
                solver = z3.Solver()
                solver.set("rlimit", rlimit)
                solver.add(*(size >= 1 for size in sizes.values()))
                solver.add(*reading.cases(goal), z3.Not(z3.simplify(goal)))
                found = solver.check()
                if found != z3.unsat:
                    return f"Z3 says {found}"
    except NotReadError as error:
        return f"no axioms: {error}"
    return ""


class Halos(Reading):
    """Terms whose convolutions say how far they reach, and whose padding says what it is of."""

    def __init__(self, rule: Rule, sizes: dict[str, Any]) -> None:
        super().__init__(rule.inputs, sizes)

    def size(self, made: Any, dim: int = -1) -> Any:
        """The size of a dim of an expression."""
        name, args = made.decl().name(), made.children()
        if name.startswith("input_"):
            return self._extent(self._declared[name.removeprefix("input_")][dim])
        of = {"near": 2, "cut": 1, "cat": 1, "again": 1}.get(name, 0)
        if name == "zeros":
            size = args[3 + dim]
        elif name == "near" and dim == -2:
            size = self.size(args[3], -3)
        elif dim != -1 or name in ("add_channel", "mirror"):
            size = self.size(args[of], dim)
        elif name == "cat":
            size = self.size(args[1]) + self.size(args[2])
        elif name == "cut":
            size = args[3] - args[2]
        elif name == "near":
            size = self.size(args[2]) - args[1]
        elif name == "again":
            size = args[0]
        else:
            raise NotReadError(f"sizes of {name}")
        return z3.simplify(size)

    def goals(self, one: Any, other: Any) -> Iterator[Any]:
        """What has to be proved, each by itself: that each of the parts of which the other side is
        put together is that of this side.
        """
        if other.decl().name() != "cat":
            yield one == other
            return
        cut, whole = FUNCTIONS["cut"], self.size(one)
        first, second = other.children()[1:]
        end = self.size(first)
        yield z3.And(end > 0, end < whole, whole == end + self.size(second))
        yield from self.goals(cut(-1, one, 0, end), first)
        yield from self.goals(cut(-1, one, end, whole), second)

    def cases(self, made: Any) -> Iterator[Any]:
        """The cases of axioms for all parts in an expression, and for those that come of them."""
        left, seen = [z3.simplify(made)], set[int]()
        while left:
            own = left.pop()
            if own.get_id() in seen:
                continue
            seen.add(own.get_id())
            left += own.children()
            if own.decl().name() != "cut":
                continue
            _, inside, s, e = own.children()
            name = inside.decl().name()
            given = {"s": s, "e": e} | dict(
                zip(NAMES.get(name, ""), inside.children(), strict=False)
            )
            for line in CASES.get(name, ()):
                yield (case := z3.simplify(self._case(line, given)))
                left.append(case)
            yield z3.simplify(self._case(WHOLE, {"a": inside, "s": s, "e": e}))

    def _case(self, line: str, given: dict[str, Any]) -> Any:
        """An axiom for these expressions."""
        names = {**FUNCTIONS, **given, "And": z3.And, "dim": self.size}
        equation, _, condition = line.partition(" if ")
        body = eval(equation, {"__builtins__": {}}, names)
        holds = eval(condition, {"__builtins__": {}}, names) if condition else True
        return z3.Implies(holds, body)

    def _extent(self, size: Size | str) -> Any:
        if isinstance(size, str):
            raise NotReadError("any dims")
        return z3.simplify(
            sum(z3.Product(*(self._sizes[n] for n in b), z3.IntVal(1)) for b in size)
        )

    def _conv1d(self, term: Term) -> Any:
        """Windows at each place of what lies between zeros."""
        x, weight = term.args[:2]
        stride, padding, dilation, groups = (
            _one(term.args[at]) if len(term.args) > at else default
            for at, default in ((3, 1), (4, 0), (5, 1), (6, 1))
        )
        kernel = self._declared[weight.name][-1] if isinstance(weight, Name) else LEAD
        if stride != 1 or groups != 1 or isinstance(kernel, str) or any(kernel):
            raise NotReadError("windows by strides, of groups or of sizes that are no numbers")
        inside, reach = self.term(x), (len(kernel) - 1) * dilation
        zeros = self._zeros(inside, padding)
        wide = self._between(inside, zeros, zeros) if padding else inside
        near = FUNCTIONS["near"](self._number("near", dilation), reach, wide, self.term(weight))
        return self._biased(near, term, "add_channel")

    def _pad(self, term: Term) -> Any:
        widths, mode = term.args[1], term.args[2] if len(term.args) > 2 else "constant"
        if not isinstance(widths, tuple) or len(widths) != 2 or len(term.args) > 3:
            raise NotReadError("padding of several dims, or by other numbers")
        inside, before, after = self.term(term.args[0]), *map(_one, widths)
        end = self.size(inside)
        ends: dict[str, Callable[[], tuple[Any, Any]]] = {
            "reflect": lambda: (
                FUNCTIONS["mirror"](self._part(inside, 1, before + 1)),
                FUNCTIONS["mirror"](self._part(inside, end - 1 - after, end - 1)),
            ),
            "replicate": lambda: (
                FUNCTIONS["again"](before, self._part(inside, 0, 1)),
                FUNCTIONS["again"](after, self._part(inside, end - 1, end)),
            ),
            "circular": lambda: (
                self._part(inside, end - before, end),
                self._part(inside, 0, after),
            ),
            "constant": lambda: (self._zeros(inside, before), self._zeros(inside, after)),
        }
        if mode not in ends or 0 in (before, after):
            raise NotReadError(f"padding {mode}")
        return self._between(inside, *ends[str(mode)]())

    def _zeros(self, like: Any, number: int) -> Any:
        """So many places of zeros beside a tensor."""
        return FUNCTIONS["zeros"](self.size(like, -3), self.size(like, -2), number)

    def _part(self, inside: Any, begin: Any, end: Any) -> Any:
        begin, end = (z3.simplify(z3.IntVal(0) + place) for place in (begin, end))
        return FUNCTIONS["cut"](-1, inside, begin, end)

    def _between(self, inside: Any, before: Any, after: Any) -> Any:
        cat = FUNCTIONS["cat"]
        return cat(-1, cat(-1, before, inside), after)


def _one(arg: Arg) -> int:
    """A number for a dim."""
    (found,) = arg if isinstance(arg, tuple) else (arg,)
    if not isinstance(found, int):
        raise NotReadError(f"{arg} for a number")
    return found
