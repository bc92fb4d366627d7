"""The second proof of rules: Z3 refutes that both sides differ, from axioms that know shapes.

Tensors are one sort; terms are read as a few functions of them (`reading.py`), of which there are
equations with their conditions (`equations.py`). Each side of an equation that has all of its
variables is a pattern by which Z3 applies it. A rule is proved where the solver ends within a fixed
amount of work (`rlimit`, no clock) and finds a contradiction; whatever else it says is a refusal.
Z3 is needed only where rules are generated or checked (the extra `rules`).
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import z3

from parloom.rewrite.generation.equations import (
    CONDITIONS,
    DIMS,
    EQUATIONS,
    EVERY_DIM,
    FUNCTIONS,
    OF_EACH_DIM,
    OF_TWO_DIMS,
    SHAPES,
    VARIABLES,
    T,
)
from parloom.rewrite.generation.reading import NotReadError, Reading, extent
from parloom.rewrite.rules import LEADS, Rule
from parloom.rewrite.terms import LEAD, Input

# What the solver may do for one rule, in its own units; those that it proves take a few thousand.
RLIMIT = 200_000


def prove_by_axioms(rule: Rule, rlimit: int = RLIMIT) -> str:
    """Empty where Z3 proves a rule; why not, otherwise."""
    sizes = {name: z3.Int(f"size_{name}") for name in (*rule.extents, LEAD)}
    solver = z3.Solver()
    # Quantifiers by patterns alone: no model is asked for.
    solver.set("auto_config", False)
    solver.set("smt.mbqi", False)
    solver.set("rlimit", rlimit)
    try:
        (sides, facts), *others = (_sides(rule, sizes, lead) for lead in LEADS)
    except NotReadError as error:
        return f"no axioms: {error}"
    for other, _ in others:
        if any(not a.eq(b) for a, b in zip(sides, other, strict=True)):
            return "no axioms: what is read depends on how many dims are in front"
    solver.add(*axioms(), *facts, *(size >= 1 for size in sizes.values()))
    for own in rule.inputs:
        solver.add(*_shape(own, sizes))
    half = len(sides) // 2
    solver.add(z3.Or(*(a != b for a, b in zip(sides[:half], sides[half:], strict=True))))
    found = solver.check()
    return "" if found == z3.unsat else f"Z3 says {found}"


def _sides(rule: Rule, sizes: Mapping[str, Any], lead: int) -> tuple[list[Any], list[Any]]:
    """The terms of the left side, and of the right one, where `*` stands for `lead` dims; and what
    holds of them besides.
    """
    reading = Reading(rule.inputs, sizes, lead)
    for one, other in zip(rule.left, rule.right, strict=True):
        if reading.shape(one) != reading.shape(other):
            raise NotReadError("sides of two shapes")
    return [reading.term(side) for side in (*rule.left, *rule.right)], reading.facts


def _shape(own: Input, sizes: Mapping[str, Any]) -> Iterator[Any]:
    """What is known of the dims of an input: those of `*` are the same everywhere, and how many
    there are is not said.
    """
    dim, tensor = FUNCTIONS["dim"], z3.Const(f"input_{own.name}", T)
    known = [extent(size, sizes) for size in own.sizes if not isinstance(size, str)][::-1]
    front = [sizes[LEAD], *(z3.Int(f"front_{at}") for at in EVERY_DIM)]
    known += front if LEAD in own.sizes else [z3.IntVal(0)] * len(EVERY_DIM)
    yield from (dim(tensor, -1 - place) == size for place, size in enumerate(known))


@lru_cache(maxsize=1)
def axioms() -> tuple[Any, ...]:
    """All of them."""
    return (*of_shapes(), *(axiom(line, dims) for line, dims in every_equation()))


def every_equation() -> Iterator[tuple[str, Mapping[str, int]]]:
    """All equations, with the dims that they are of."""
    yield from ((line, {}) for line in EQUATIONS)
    yield from ((line, {"k": k}) for line in OF_EACH_DIM for k in DIMS)
    pairs = [(k, o) for k in DIMS for o in DIMS if k != o]
    yield from ((line, {"k": k, "o": o}) for line in OF_TWO_DIMS for k, o in pairs)


@lru_cache(maxsize=1)
def of_shapes() -> tuple[Any, ...]:
    """What each size of a call is."""
    return tuple(axiom(f"dim({call}, {k}) == {size}", {}) for call, k, size in _sizes())


def _sizes() -> Iterator[tuple[str, int, str]]:
    """Calls with a dim, and the size of that dim."""
    for call, sizes in SHAPES:
        yield from ((call, -1 - place, size) for place, size in enumerate(sizes))
    for k in DIMS:
        for o in EVERY_DIM:
            both = f"dim(a, {o}) + dim(b, {o})" if k == o else f"dim(a, {o})"
            yield f"cat({k}, a, b)", o, both
            yield f"cut({k}, a, s, e)", o, "e - s" if k == o else f"dim(a, {o})"


def axiom(line: str, dims: Mapping[str, int]) -> Any:
    """An equation with its condition, for all values of its variables."""
    left, right, condition = parts(line, dims)
    body = left == right
    if condition is not None:
        body = z3.Implies(condition, body)
    used = [VARIABLES[name] for name in VARIABLES if _has(body, VARIABLES[name])]
    # What says a size is there for each call, and for no sizes: any two have a sum.
    sides = [left.arg(0)] if left.decl().name() == "dim" else [left, right]
    patterns = [
        side
        for side in sides
        if z3.is_app(side) and side.num_args() and all(_has(side, own) for own in used)
    ]
    return z3.ForAll(used, body, patterns=patterns)


def parts(line: str, dims: Mapping[str, int]) -> tuple[Any, Any, Any]:
    """Both sides of an equation, and its condition or None."""
    equation, _, condition = line.partition(" if ")
    left, right = (_read(side, dims) for side in equation.split(" == "))
    return left, right, _read(condition, dims) if condition else None


def _read(text: str, dims: Mapping[str, int]) -> Any:
    """Text of `equations.py` as an expression."""
    names = {**FUNCTIONS, **VARIABLES, **CONDITIONS, **dims}
    return eval(text, {"__builtins__": {}}, names)


def _has(expression: Any, variable: Any) -> bool:
    if expression.eq(variable):
        return True
    return any(_has(own, variable) for own in expression.children())
