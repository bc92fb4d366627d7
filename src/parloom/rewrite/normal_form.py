"""Elements of tensors as normal forms of index expressions.

An element is a sum of monomials in *atoms*: elements of inputs, opaque functions, sizes. Digits
that are summed over are *bound*; monomials are equal up to the names of these, and the least way to
write one is its canonical form. So programs whose elements have equal forms are equal for all
shapes; the converse does not hold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count, permutations
from typing import Any

from parloom.rewrite.lines import line_of, offset_of, plus_lines

Var = tuple[Any, ...]
"""A digit of a place, ("free", dim, digit), ("bound", depth, number) or ("row", depth, digit), or a
place that is computed, ("window", stride, offset, var) or ("at", atom); an offset is a number or a
`Line`, and a window without a var is at one place.
"""
Frozen = tuple[tuple["Monomial", Fraction], ...]
Atom = tuple[str, Any, tuple[int, ...], tuple[Var, ...], tuple[Frozen, ...]]
"""Kind, name (of a function of rows with their dim, whose extents it depends on), blocks, digits of
the place, and the elements that an opaque function is of.
"""
Monomial = tuple[tuple[tuple[Var, str], ...], tuple[Atom, ...]]
"""The digits that are summed over with their extents, and the factors."""
Poly = dict[Monomial, Fraction]
UNIT: Monomial = ((), ())
INPUT, FUNCTION, ROWS = "input", "function", "rows"
SIZE, INVERSE, INSIDE = "size", "inverse", "inside"
_fresh = count()


def one_of(atom: Atom) -> Poly:
    """An element that is an atom."""
    return {((), (atom,)): Fraction(1)}


def constant(value: Fraction) -> Poly:
    """An element that is a number."""
    return {UNIT: value} if value else {}


def fresh() -> Var:
    """A digit to be bound that nothing else has."""
    return ("bound", -1, next(_fresh))


def free(dim: int, digit: int) -> Var:
    """A digit of a place."""
    return ("free", dim, digit)


def plus(one: Poly, other: Poly) -> Poly:
    """The sum."""
    found = dict(one)
    for monomial, value in other.items():
        _add(found, monomial, value)
    return found


def times(one: Poly, other: Poly) -> Poly:
    """The product."""
    found: Poly = {}
    for (left, atoms), value in _apart(one).items():
        for (right, more), factor in _apart(other).items():
            _add(found, ((*left, *right), (*atoms, *more)), value * factor)
    return found


def summed(poly: Poly, digits: Sequence[tuple[Var, str]]) -> Poly:
    """The sum over digits."""
    return {((*bound, *digits), atoms): value for (bound, atoms), value in poly.items()}


def changed(poly: Poly, change: Mapping[Var, Var]) -> Poly:
    """The same at another place."""
    found: Poly = {}
    for (bound, atoms), value in poly.items():
        renamed = tuple((change.get(var, var), extent) for var, extent in bound)
        _add(found, (renamed, tuple(_atom(atom, change) for atom in atoms)), value)
    return found


def frozen(poly: Poly) -> Frozen:
    """The same as a value; equal for equal canonical forms."""
    return tuple(sorted(poly.items(), key=repr))


def window(stride: int, offset: Any, var: Var | None) -> Var:
    """A place that moves with another one; a window of a window is one."""
    if (stride, offset) == (1, 0) and var is not None:
        return var
    if var is not None and var[0] == "window":
        return window(stride * var[1], moved(var[2], stride, offset), var[3])
    return ("window", stride, offset, var)


def moved(offset: Any, times: int, by: Any) -> Any:
    """`offset * times + by`, a number where it has no extents."""
    return offset_of(plus_lines(line_of(by), line_of(offset), times))


def depth_of(poly: Poly) -> int:
    """How deep functions of rows are nested in it."""
    below = [0]
    for _, atoms in poly:
        for kind, _, _, digits, inside in atoms:
            deepest = max((depth_of(dict(own)) for own in inside), default=0)
            places = (depth_of(one_of(v[1])) for v in digits if v[0] == "at")
            below.append(max(deepest + (kind == ROWS), *places, 0))
    return max(below)


def canonical(poly: Poly, depth: int = 0) -> Poly:
    """The same sum with each monomial written in the least way, its bound digits numbered; `depth`
    counts the opaque functions around it.
    """
    found: Poly = {}
    for monomial, value in poly.items():
        _add(found, _least(_simple(monomial), depth), value)
    return found


# Replacing variables.


def _var(var: Var, change: Mapping[Var, Var]) -> Var:
    if var in change:
        return change[var]
    if var[0] == "window":
        return var if var[3] is None else window(var[1], var[2], _var(var[3], change))
    return ("at", _atom(var[1], change)) if var[0] == "at" else var


def _atom(atom: Atom, change: Mapping[Var, Var]) -> Atom:
    kind, name, blocks, digits, inside = atom
    own = tuple(frozen(changed(dict(poly), change)) for poly in inside)
    return kind, name, blocks, tuple(_var(var, change) for var in digits), own


def _apart(poly: Poly) -> Poly:
    """The same with bound digits that nothing else has."""
    found: Poly = {}
    for monomial, value in poly.items():
        found.update(changed({monomial: value}, {var: fresh() for var, _ in monomial[0]}))
    return found


def _add(poly: Poly, monomial: Monomial, value: Fraction) -> None:
    total = poly.get(monomial, Fraction(0)) + value
    if total:
        poly[monomial] = total
    else:
        poly.pop(monomial, None)


# Canonical forms.


def _simple(monomial: Monomial) -> Monomial:
    """A monomial without sums over digits that nothing depends on, sizes that cancel, and what says
    twice that a place is inside.
    """
    bound, atoms = monomial
    used = set[Var]().union(*map(_variables, atoms))
    sums = [(SIZE, extent, (), (), ()) for var, extent in bound if var not in used]
    kept: list[Atom] = []
    for atom in (*atoms, *sums):
        other = {SIZE: INVERSE, INVERSE: SIZE}.get(atom[0])
        if other is not None and (other, *atom[1:]) in kept:
            kept.remove((other, *atom[1:]))
        elif atom[0] != INSIDE or atom not in kept:
            kept.append(atom)
    return tuple((var, extent) for var, extent in bound if var in used), tuple(kept)


def _variables(atom: Atom) -> set[Var]:
    """The digits that an atom depends on."""
    found: set[Var] = set()
    for var in atom[3]:
        while var is not None and var[0] == "window":
            var = var[3]
        if var is not None:
            found |= _variables(var[1]) if var[0] == "at" else {var}
    for poly in atom[4]:
        for (bound, atoms), _ in poly:
            found |= set[Var]().union(*map(_variables, atoms)) - {var for var, _ in bound}
    return found


def _least(monomial: Monomial, depth: int) -> Monomial:
    """A monomial in its least order. What is inside of functions is numbered first: a sum in there
    that still had the numbers of this depth would capture this one's digits.
    """
    bound, atoms = monomial
    apart = [_deep(atom, depth + 1) for atom in atoms]
    tried = (_written(order, apart, depth) for order in _orders(bound))
    return min(tried, key=repr)


def _orders(bound: Sequence[tuple[Var, str]]) -> Iterator[tuple[tuple[Var, str], ...]]:
    """All orders of digits in which extents are sorted."""
    extents = sorted(extent for _, extent in bound)
    return (order for order in permutations(bound) if [e for _, e in order] == extents)


def _written(order: Sequence[tuple[Var, str]], atoms: Sequence[Atom], depth: int) -> Monomial:
    change = {var: ("bound", depth, number) for number, (var, _) in enumerate(order)}
    own = (_deep(_atom(atom, change), depth + 1) for atom in atoms)
    return tuple((change[var], e) for var, e in order), tuple(sorted(own, key=repr))


def _deep(atom: Atom, depth: int) -> Atom:
    """An atom with what is inside of it in canonical form."""
    kind, name, blocks, digits, inside = atom
    places = tuple(("at", _deep(v[1], depth)) if v[0] == "at" else v for v in digits)
    return kind, name, blocks, places, tuple(frozen(canonical(dict(p), depth)) for p in inside)


Element = Callable[[tuple[int, ...]], Poly]
"""The element of a tensor in a combination of blocks."""
