"""Whether a take follows from the rules that it names, and which of them it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from parloom.ir.graph import DTYPE_BYTES, Function, Node, Value
from parloom.rewrite import merge
from parloom.rewrite.bodies import Body
from parloom.rewrite.folds import folds
from parloom.rewrite.horizontal import is_fusion
from parloom.rewrite.known import cases, holds, is_proved, partial_rules
from parloom.rewrite.rounding import may_round
from parloom.rewrite.rules import Rule
from parloom.rewrite.symbolic import NotExpressed
from parloom.rewrite.take import Take
from parloom.rewrite.terms import Term, calls_in, in_pairs, names_in

# Calls that a function is given at most, and rounds of rules.
MOST_NODES, ROUNDS = 1_000, 6
# The least width of numbers whose arithmetic may be done in any order.
WIDE = 4


def narrow_in(function: Function) -> set[str]:
    """The floating dtypes of values of a function whose rounding rules have to respect."""
    found = {spec.dtype for spec in function.specs().values() if spec.is_float}
    return {dtype for dtype in found if DTYPE_BYTES[dtype] < WIDE}


def rules_for(function: Function) -> list[Rule]:
    """The rules that may be applied to values of a function, as far as is known of their errors in
    its dtypes: `inexact` measures them.
    """
    narrow = narrow_in(function)
    known = (own.rule for own in cases(function) if narrow <= own.narrow)
    return [*known, *folds(function)]


def partial_for(function: Function) -> list[Rule]:
    """Those of `partial_rules` that may be applied to values of a function likewise."""
    narrow = narrow_in(function)
    return [own.rule for own in partial_rules().values() if narrow <= own.narrow]


def inexact(function: Function, rules: Iterable[Rule]) -> str:
    """Which of these rules makes errors that are too large in a dtype of a function; empty for
    none.
    """
    pairs = product(rules, sorted(narrow_in(function)))
    found = (f"{rule.id} in {dtype}" for rule, dtype in pairs if not may_round(rule, dtype))
    return next(found, "")


def named_rules(function: Function, take: Take) -> list[Rule]:
    """The rules that a take names, as far as they may be applied."""
    every = (*rules_for(function), *partial_for(function))
    return [own for own in every if own.id in take.rules]


def with_few_rules(function: Function, take: Take) -> Take | None:
    """A take by as many of its rules as are needed, by all where calls are fused; None where it
    does not follow from them in few rounds, or from none of them, or is less exact by one.
    """
    if take.rules and all(map(is_fusion, take.rules)):
        return take
    needed = _used(function, take, named_rules(function, take))
    for own in tuple(needed or ()):
        if needed is not None and own in needed:
            rest = _used(function, take, [other for other in needed if other is not own])
            needed = needed if rest is None else rest
    if needed is None or inexact(function, needed):
        return None
    ops = {call.op for call in calls_in(take.call)}
    merged = (name for name, op in merge.RULES.items() if name in take.rules and op in ops)
    rules = (*merged, *(own.id for own in needed))
    return replace(take, rules=rules) if rules else None


def follows(function: Function, take: Take, rules: Sequence[Rule]) -> bool:
    """Whether the results of a take are the values of `function` in whose place they are, by these
    rules, each of which holds, and by the merges that the take names.
    """
    return _used(function, take, rules) is not None


def follows_as_named(function: Function, take: Take) -> bool:
    """Whether a take follows from the rules that it names, and says none that it does not need to
    get there: one that changes nothing follows from any.
    """
    used = _used(function, take, named_rules(function, take))
    if used is None:
        return False
    ops = {call.op for call in calls_in(take.call)}
    there = {own.id for own in used} | {name for name, op in merge.RULES.items() if op in ops}
    return there.issuperset(take.rules)


def _used(function: Function, take: Take, rules: Sequence[Rule]) -> list[Rule] | None:
    """The rules among these that changed anything until a take followed; None where it does not,
    or where one of them does not hold.
    """
    body = Body(_above(function, take), MOST_NODES)
    named = {*names_in(take.call), *(name for _, name in take.taken)}
    if not named <= body.classes.keys() or not all(map(holds, rules)):
        return None
    try:
        made = {
            name: body.graph.add(
                in_pairs(Term(take.call.op, take.call.args, index)), body.classes, {}
            )
            for index, name in take.taken
        }
    except NotExpressed:
        return None

    def is_there() -> bool:
        return all(body.graph.find(one) == body.class_of(name) for name, one in made.items())

    merged = not merge.RULES.keys().isdisjoint(take.rules)
    for _ in range(ROUNDS):
        joined = merged and merge.unite_products(body.graph)
        if is_there() or (body.saturate(rules, 1, is_proved) and not joined):
            break
    return [own for own in rules if own.id in body.graph.fired] if is_there() else None


def _above(function: Function, take: Take) -> Function:
    """What makes the values of a take of what its call reads, and of that what is made of values
    there; all else is an input.
    """
    makers = {v.name: item for item in function.body for v in item.results}
    specs, read = function.specs(), set(names_in(take.call))
    found, inputs, left = set[int](), dict[str, None](), [name for _, name in take.taken]
    while left:
        name = left.pop()
        item = makers.get(name)
        if not isinstance(item, Node) or (name in read and name not in take.values):
            inputs[name] = None
        elif id(item) not in found:
            found.add(id(item))
            left += item.refs
    known = {*inputs, *read, *(v.name for i in function.body if id(i) in found for v in i.results)}
    found |= {
        id(item)
        for item in function.body
        if isinstance(item, Node)
        and not read.isdisjoint(v.name for v in item.results)
        and known.issuperset(item.refs)
    }
    body = tuple(item for item in function.body if id(item) in found)
    made = {value.name for item in body for value in item.results}
    given = (name for name in (*inputs, *sorted(read)) if name in specs)
    values = tuple(Value(name, specs[name]) for name in dict.fromkeys(given) if name not in made)
    return replace(function, inputs=values, body=body, outputs=())
