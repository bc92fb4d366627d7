"""Numbers that remember how they came about, and what was read of them.

In the place of a counter, such a number takes part in arithmetic, and notes what leaves it: the
outcome of a comparison, and its value where it becomes an index, a hash or an operand of torch.
So a call says for which other values of its counters it would go the same way, and what it makes
of them. Text is not noted: counters are printed and logged.
"""

import dis
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

Values = Mapping[int, Any]  # of variables, by their number
Term = Callable[[Values], Any]

KINDS = (int, float)
OPERATIONS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift",
)  # fmt: skip
COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
UNARY: Mapping[str, Callable[[Any], Any]] = {
    "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "invert": operator.invert,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
}  # fmt: skip
# Instructions of Python that ask for an index, and read nothing: `text % n`, `kept[n] = value`.
WRITES = ("STORE_SUBSCR", "DELETE_SUBSCR")
FORMATS = ("%", "%=")


@dataclass(slots=True)
class Reads:
    """What a call reads of numbers: terms with their outcomes.

    `gaps` are the differences of what is compared: an outcome changes where one is zero.
    """

    found: list[tuple[Term, Any]] = field(default_factory=list)
    gaps: list[Term] = field(default_factory=list)
    active: bool = False

    def note(self, term: Term, outcome: Any, gap: Term | None = None) -> None:
        """One outcome more."""
        if self.active:
            self.found.append((term, outcome))
            self.gaps += [] if gap is None else [gap]

    def hold(self, values: Values) -> bool:
        """Whether a call that finds these values goes the same way."""
        try:
            return all(is_same(term(values), outcome) for term, outcome in self.found)
        except (ArithmeticError, ValueError, TypeError):
            return False


def is_same(one: Any, other: Any) -> bool:
    """Whether two outcomes are one number, of one type."""
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")


def is_number(value: object) -> bool:
    """Whether a value is counted with; truth values are not."""
    return type(value) in KINDS or (
        isinstance(value, numpy.number) and not isinstance(value, numpy.complexfloating)
    )


class Number:
    """A number with the term that it is of the variables of a call."""

    __slots__ = ("reads", "term", "value")
    __array_ufunc__ = None  # numpy leaves the operation to this class

    def __init__(self, value: Any, term: Term, reads: Reads) -> None:
        self.value, self.term, self.reads = value, term, reads

    @classmethod
    def variable(cls, number: int, value: Any, reads: Reads) -> "Number":
        """A number of the state that a call finds."""
        return cls(value, lambda values: values[number], reads)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """`isinstance(self.calls, int)` is as true as it was."""
        return type(self.value)

    def read(self) -> Any:
        """The value, which is noted."""
        self.reads.note(self.term, self.value)
        return self.value

    def of(self, operation: Callable[[Any], Any]) -> "Number":
        """What an operation makes of it."""
        term = self.term
        return Number(operation(self.value), lambda v: operation(term(v)), self.reads)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*plain(args), **plain(kwargs or {}))

    def __bool__(self) -> bool:
        term, outcome = self.term, bool(self.value)
        self.reads.note(lambda v: bool(term(v)), outcome)
        return outcome

    def __index__(self) -> int:
        return operator.index(self.value if is_written() else self.read())

    def __int__(self) -> int:
        return int(self.value if is_written() else self.read())

    def __float__(self) -> float:
        return float(self.value if is_written() else self.read())

    def __complex__(self) -> complex:
        return complex(self.read())

    def __hash__(self) -> int:
        return hash(self.value if is_written() else self.read())

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __round__(self, digits: int | None = None) -> "Number":
        return self.of(lambda value: round(value, digits))

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __copy__(self) -> "Number":
        return self

    def __deepcopy__(self, memo: Any) -> "Number":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.pos, (self.read(),)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)


def plain(value: Any) -> Any:
    """Arguments of a call with the values of numbers, which are noted."""
    if type(value) is Number:
        return value.read()
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {name: plain(item) for name, item in value.items()}
    return value


def is_written() -> bool:
    """Whether the instruction that asks formats text, or writes to a place in a container."""
    frame = sys._getframe(2)
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.opname in WRITES or (
                instruction.opname == "BINARY_OP" and instruction.argrepr in FORMATS
            )
    return False


def term_of(value: Any) -> Term | None:
    """The term of an operand, of what is no number None."""
    if type(value) is Number:
        found: Term = value.term
        return found
    return (lambda _: value) if is_number(value) or type(value) is bool else None


def value_of(value: Any) -> Any:
    """The value of an operand."""
    return value.value if type(value) is Number else value


def binary(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operation of two numbers, and the one that has its operands the other way around."""
    operation = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def joined(left: Any, right: Any) -> Any:
        one, other = term_of(left), term_of(right)
        if one is None or other is None:
            return operation(plain(left), plain(right))
        value = operation(value_of(left), value_of(right))
        reads = left.reads if type(left) is Number else right.reads
        return Number(value, lambda v: operation(one(v), other(v)), reads)

    return joined, lambda self, other: joined(other, self)


def comparison(name: str) -> Callable[[Number, Any], Any]:
    """A comparison, whose outcome is noted."""
    operation = getattr(operator, name)

    def compared(self: Number, other: Any) -> Any:
        one, another = self.term, term_of(other)
        if another is None:
            return NotImplemented
        outcome = bool(operation(self.value, value_of(other)))
        self.reads.note(
            lambda v: bool(operation(one(v), another(v))), outcome, lambda v: one(v) - another(v)
        )
        return outcome

    return compared


def unary(operation: Callable[[Any], Any]) -> Callable[[Number], Number]:
    """An operation of one number."""
    return lambda self: self.of(operation)


for _name in OPERATIONS:
    _forward, _swapped = binary(_name)
    setattr(Number, f"__{_name}__", _forward)
    setattr(Number, f"__r{_name}__", _swapped)
for _name in COMPARISONS:
    setattr(Number, f"__{_name}__", comparison(_name))
for _name, _operation in UNARY.items():
    setattr(Number, f"__{_name}__", unary(_operation))
