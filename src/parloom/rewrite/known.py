"""The rules that come with parloom (`rules.json` and `partial.json`, which `regenerate` writes),
and their cases.

A rule of one opaque function or of one number is true of others as far as its proof is: cases for
those of a model are made as they are needed. Whoever applies a rule has it proved first.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from types import MappingProxyType
from typing import Any

from parloom.errors import InputError
from parloom.ir.graph import Function, Node, Ref, TensorSpec
from parloom.ir.ops import OPS
from parloom.rewrite.egraph import Match
from parloom.rewrite.families import FACTOR, FUNCTION, HALF, SCALE, SHARE
from parloom.rewrite.rounding import NARROW
from parloom.rewrite.rules import Rule, id_of, misfit, prove, rule
from parloom.rewrite.shapes import ARGUMENTS
from parloom.rewrite.terms import Arg, Name, Term, calls_in

FILE, PARTIAL, NUMBERS = "rules.json", "partial.json", (HALF, FACTOR)
VERSION = 4
"""Of the files' form."""
NUMBER = re.compile(r"m?[0-9]{1,20}(p[0-9]{1,20})?(em?[0-9]{1,3})?")
"""How a case names its number: `m0p5` is -0.5."""
# Operators that are told more than one tensor, so that no case is of them.
_SEVERAL = """
add sub mul div eq ne lt le gt ge __and__ __or__ __xor__ __lshift__ __rshift__ bitwise_and
bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift remainder rsub maximum minimum
fmax fmin atan2 logaddexp logaddexp2 xlogy fmod ldexp nextafter hypot copysign igamma igammac
special_xlog1py special_zeta pow floor_divide heaviside gcd lcm logical_and logical_or
logical_xor isclose where masked_fill fill lerp addcmul addcdiv complex polar parloom.either
clamp_min clamp_max polygamma mvlgamma threshold frexp softmax log_softmax squeeze
"""
SEVERAL = frozenset(_SEVERAL.split())
RESTORE = (
    "install parloom again, or make it anew with python -m parloom.rewrite.generation.regenerate"
)


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
    """Whether this is the id of a rule, or of a case of one that holds."""
    known = known_rules()
    if name in partial_rules() or name in known:
        return True
    return any(_is_case(known[base], name[len(base) + 1 :]) for base in base_ids(name))


@cache
def base_ids(name: str) -> tuple[str, ...]:
    """The ids of rules of which this may be the id of a case."""
    cuts = (place for place, letter in enumerate(name) if letter == "_")
    return tuple(name[:at] for at in cuts if name[:at] in known_rules())


def case_names(pattern: str) -> Iterator[str]:
    """The ids of all cases of functions, and of those of numbers one that a glob may mean."""
    ops = [op for op, own in OPS.items() if own.computes is not None and _may_be_case(op)]
    number = pattern.rpartition("_")[2].replace("*", "1").replace("?", "1")
    for own in known_rules().values():
        yield from (f"{own.rule.id}_{op}" for op in ops if own.of_function)
        if own.number is not None and NUMBER.fullmatch(number):
            yield f"{own.rule.id}_{number}"


def _may_be_case(op: str) -> bool:
    return op != FUNCTION.op and op not in SEVERAL


def _is_case(own: Known, suffix: str) -> bool:
    """Whether a rule has a case of that name which is true."""
    if own.of_function and suffix in OPS and _may_be_case(suffix):
        made = _case(own, suffix, {FUNCTION.op: suffix}, {})
    elif own.number is not None and NUMBER.fullmatch(suffix):
        text = suffix.replace("p", ".").replace("m", "-")
        number = int(text) if text.lstrip("-").isdigit() else float(text)
        if _named(number) != suffix or number == own.number or not isfinite(number):
            return False
        made = _case(own, suffix, {}, {own.number: number})
    else:
        return False
    return not misfit(made.rule) and holds(made.rule)


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
    for own in known_rules().values():
        numbers = [number for op, number in every if op == own.scaling]
        if own.number is None or own.number in numbers:
            yield own
            for op in filter(_may_be_case, ops) if own.of_function else ():
                yield _case(own, op, {FUNCTION.op: op}, {})
        for number in numbers:
            if number != own.number:
                yield _case(own, _named(number), {}, {own.number: number})


def _rules_of(file: str) -> Mapping[str, Known]:
    """The rules of one file; raises `InputError` that says which of them is wrong and why."""
    where = files("parloom.rewrite").joinpath(file)
    try:
        document = json.loads(where.read_text(encoding="utf-8"))
        version = document["version"]
        entries = document["rules"] if version == VERSION else []
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        said = f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: no file of rules: {said}; {RESTORE}") from None
    if version != VERSION:
        raise InputError(f"{where}: version {version!r}, not {VERSION}; {RESTORE}")
    if not isinstance(entries, list):
        raise InputError(f"{where}: its rules are no list; {RESTORE}")
    found = dict[str, Known]()
    for place, entry in enumerate(entries):
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise InputError(f"{where}: rule {place} has no id: {entry!r}; {RESTORE}")
        if name in found:
            raise InputError(f"{where}: {name} is there twice; {RESTORE}")
        try:
            found[name] = _read(entry)
        except (InputError, *ARGUMENTS, RecursionError) as error:
            said = str(error) if isinstance(error, InputError) else repr(error)
            raise InputError(f"{where}: {name}: {said}; {RESTORE}") from None
    return MappingProxyType(found)


def _read(entry: Mapping[str, Any]) -> Known:
    """A rule as it is written; raises what is wrong with it."""
    left, right, narrow = (entry[key] for key in ("left", "right", "narrow"))
    for key, texts in (("left", left), ("right", right), ("narrow", narrow)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{key} is no list of texts: {texts!r}")
    if not {*narrow} <= {*NARROW}:
        raise InputError(f"narrow: {narrow!r}; there are: {', '.join(NARROW)}")
    found = rule(entry["id"], entry["inputs"], left, right)
    if reason := misfit(found):
        raise InputError(reason)
    if found.id != id_of(found, entry["inputs"], left, right):
        raise InputError(
            f"both sides are not equal: {reason}"
            if (reason := prove(found))
            else "it was edited, and is not proved a second time, which regenerating does"
        )
    calls = {call for side in (*found.left, *found.right) for call in calls_in(side)}
    of_function = any(call.op == FUNCTION.op for call in calls)
    numbers = ((n, call.op) for n in NUMBERS for call in calls if n in call.args)
    number, op = next(numbers, (None, ""))
    return Known(found, frozenset(narrow), of_function, number, op)


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
