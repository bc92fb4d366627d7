"""The rules that come with parloom (`rules.json` and `partial.json`, which `regenerate` writes),
and their cases.

A rule of one opaque function or of one number is true of others as far as its proof is: cases for
those of a model are made as they are needed. Whoever applies a rule has it proved first.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from types import MappingProxyType
from typing import Any

from parloom.errors import InputError
from parloom.ir.graph import Function, Node, Ref, TensorSpec
from parloom.rewrite.egraph import Match
from parloom.rewrite.families import FACTOR, FUNCTION, HALF, SCALE, SHARE
from parloom.rewrite.rules import Rule, prove, rule
from parloom.rewrite.terms import Arg, Name, Term, calls_in

FILE, PARTIAL, NUMBERS = "rules.json", "partial.json", (HALF, FACTOR)


@dataclass(frozen=True, slots=True)
class Known:
    """A rule, and the dtypes of 16 bits in which it may be applied. One of a function, or of a
    `number`, has cases.
    """

    rule: Rule
    narrow: frozenset[str]
    of_function: bool = False
    number: float | None = None
    scaling: str = ""
    """The operator that has the number."""


@cache
def known_rules() -> Mapping[str, Known]:
    """Those of the basis, by their ids. Raises `InputError` for one that cannot be read."""
    return _rules_of(FILE)


@cache
def partial_rules() -> Mapping[str, Known]:
    """Those of programs that are equal on a part and corrected on the rest (`partial.py`)."""
    return _rules_of(PARTIAL)


def is_rule(name: str) -> bool:
    """Whether this is the id of a rule, or of a case of one."""
    known = known_rules()
    return name in partial_rules() or name in known or any(name.startswith(f"{o}_") for o in known)


@cache
def holds(found: Rule) -> bool:
    """Whether both sides have equal normal forms."""
    return not prove(found)


def is_proved(match: Match) -> bool:
    """Whether the rule that matches holds."""
    return holds(match.way.rule)


def cases(function: Function) -> Iterator[Known]:
    """All rules, and the same of the functions that calls of `function` have; those of numbers are
    of its own only.
    """
    nodes = [item for item in function.body if isinstance(item, Node)]
    specs = function.specs()
    ops = dict.fromkeys(node.op for node in nodes if _is_unary(node, specs))
    every = dict.fromkeys((node.op, node.args[1]) for node in nodes if _is_scaled(node))
    ops.pop(FUNCTION.op, None)
    for own in known_rules().values():
        numbers = [number for op, number in every if op == own.scaling]
        if own.number is None or own.number in numbers:
            yield own
            for op in ops if own.of_function else ():
                yield _case(own, op, {FUNCTION.op: op}, {})
        for number in numbers:
            if number != own.number:
                yield _case(own, _named(number), {}, {own.number: number})


def _rules_of(file: str) -> Mapping[str, Known]:
    text = files("parloom.rewrite").joinpath(file).read_text(encoding="utf-8")
    found = (_read(file, entry) for entry in json.loads(text)["rules"])
    return MappingProxyType({own.rule.id: own for own in found})


def _read(file: str, entry: Mapping[str, Any]) -> Known:
    try:
        found = rule(entry["id"], entry["inputs"], entry["left"], entry["right"])
        calls = {call for side in (*found.left, *found.right) for call in calls_in(side)}
        of_function = any(call.op == FUNCTION.op for call in calls)
        numbers = ((n, call.op) for n in NUMBERS for call in calls if n in call.args)
        number, op = next(numbers, (None, ""))
        return Known(found, frozenset(entry["narrow"]), of_function, number, op)
    except (KeyError, TypeError) as error:
        raise InputError(f"{file}: {entry}: {error!r}") from None


def _is_unary(node: Node, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether it may be a function of elements: a proof says whether it is."""
    if len(node.args) != 1 or not isinstance(node.args[0], Ref) or node.kwargs:
        return False
    return [value.spec for value in node.results] == [specs[node.args[0].name]]


def _is_scaled(node: Node) -> bool:
    if node.op not in (SCALE.op, SHARE.op) or node.kwargs:
        return False
    return len(node.args) == 2 and isinstance(node.args[1], (int, float)) and isfinite(node.args[1])


def _named(number: object) -> str:
    """A number as part of a name."""
    return str(number).replace("-", "m").replace(".", "p").replace("+", "")


def _case(own: Known, suffix: str, ops: Mapping[str, str], numbers: Mapping[Any, Any]) -> Known:
    def other(arg: Arg) -> Arg:
        if isinstance(arg, Term):
            return Term(ops.get(arg.op, arg.op), tuple(map(other, arg.args)), arg.result)
        if isinstance(arg, tuple):
            return tuple(map(other, arg))
        return numbers.get(arg, arg) if isinstance(arg, float) else arg

    def side(terms: tuple[Term | Name, ...]) -> tuple[Term | Name, ...]:
        made = tuple(map(other, terms))
        assert all(isinstance(term, (Term, Name)) for term in made)
        return made  # type: ignore[return-value]

    found = own.rule
    rules = Rule(f"{found.id}_{suffix}", found.inputs, side(found.left), side(found.right))
    return replace(own, rule=rules)
