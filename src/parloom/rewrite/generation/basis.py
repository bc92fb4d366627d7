"""Rules of which others follow: candidates without renamings, and without what is derived."""

from collections.abc import Iterator, Sequence

from parloom.rewrite.egraph import EGraph
from parloom.rewrite.generate import Equal
from parloom.rewrite.rules import LEADS, Rule, names_at, prove
from parloom.rewrite.shapes import Dims, Shapes
from parloom.rewrite.symbolic import ONE, NotExpressed, dim
from parloom.rewrite.terms import (
    LEAD,
    Arg,
    Extent,
    Input,
    Name,
    Size,
    Term,
    calls_in,
    evaluate,
    names_in,
    size_in,
)

# Rounds and calls within which a rule has to follow from others.
ROUNDS, MOST_NODES = 3, 400


def renamed(equal: Equal) -> Rule:
    """A candidate with inputs and sizes named by their first places; its id says both sides."""
    order = dict.fromkeys((*names_in(equal.left), *names_in(equal.right)))
    declared = {own.name: own for own in equal.inputs}
    names = {name: f"x{i}" for i, name in enumerate(order)}
    sizes: dict[str, str] = {}
    inputs = []
    for name in order:
        own = declared[name]
        shape = tuple(s if isinstance(s, str) else _size(s, sizes) for s in own.sizes)
        below = None if own.below is None else _size(own.below, sizes)
        inputs.append(Input(names[name], shape, below))
    left, right = (_arg(side, names, sizes) for side in (equal.left, equal.right))
    assert isinstance(left, (Term, Name))
    assert isinstance(right, (Term, Name))
    return Rule(f"{left} = {right}", tuple(inputs), (left,), (right,))


def distinct(candidates: Sequence[Equal]) -> list[Rule]:
    """Candidates of which none is another one with other names, the simplest and most general
    first.
    """
    found: dict[tuple[object, ...], Rule] = {}
    for equal in candidates:
        rules = [renamed(equal), renamed(Equal(equal.inputs, equal.right, equal.left))]
        keys = [(rule.inputs, rule.left, rule.right) for rule in rules]
        if not any(key in found for key in keys):
            found[keys[0]] = rules[0]
    return sorted(found.values(), key=_generality)


def says_more(rule: Rule) -> bool:
    """Whether a rule of one output is more than a rule of a part of its sides (TASO, SOSP'19,
    section 4, prunes those with common subgraphs): of an input in the place of a call that both
    sides have, or of the one operand in which their last calls differ.
    """
    (left,), (right,) = rule.left, rule.right
    shared = set(calls_in(left)) & set(calls_in(right))
    if any(not prove(found) for call in shared for found in _without(rule, call)):
        return False
    if not (isinstance(left, Term) and isinstance(right, Term)):
        return True
    if (left.op, left.result, len(left.args)) != (right.op, right.result, len(right.args)):
        return True
    pairs = zip(_operands(left), _operands(right), strict=False)
    differ = [(one, other) for one, other in pairs if one != other]
    if len(differ) != 1 or len(_operands(left)) != len(_operands(right)):
        return True
    ((one, other),) = differ
    if not (isinstance(one, (Term, Name)) and isinstance(other, (Term, Name))):
        return True
    return bool(prove(Rule(rule.id, rule.inputs, (one,), (other,))))


def _operands(term: Term) -> tuple[Arg, ...]:
    """Arguments, of tuples each one."""
    parts = ((own if isinstance(own, tuple) else (own,)) for own in term.args)
    return tuple(one for part in parts for one in part)


def _without(rule: Rule, call: Term) -> Iterator[Rule]:
    """A rule with inputs for the results of a call; none where they are no tensors of numbers."""
    parts = call.args[1] if call.op == "split_with_sizes" else None
    results = range(len(parts)) if isinstance(parts, tuple) else range(1)
    if any(own.below is not None for own in rule.inputs):
        return
    sizes = {name: dim(name) for name in rule.extents}
    shapes = {
        own.name: Dims(tuple(size_in(s, sizes, ONE) for s in own.sizes if not isinstance(s, str)))
        for own in rule.inputs
    }
    terms = [Term(call.op, call.args, result) for result in results]
    try:
        made = evaluate(terms, Shapes(), shapes, sizes)
    except NotExpressed:  # a window larger than its image
        return
    inputs = tuple(Input(f"shared{i}", one.shape) for i, one in enumerate(made))

    def other(arg: Arg) -> Arg:
        if isinstance(arg, Term):
            if Term(arg.op, arg.args) == call:
                return Name(inputs[arg.result or 0].name)
            return Term(arg.op, tuple(map(other, arg.args)), arg.result)
        return tuple(map(other, arg)) if isinstance(arg, tuple) else arg

    sides = tuple((other(side),) for side in (*rule.left, *rule.right))
    yield Rule(rule.id, (*rule.inputs, *inputs), *sides)  # type: ignore[arg-type]


def basis(rules: Sequence[Rule], known: Sequence[Rule] = ()) -> list[Rule]:
    """Rules of which none follows from the rest and from what is `known`, and of which all others
    do: those that do not follow from simpler ones, and then without simple ones that are cases of
    more general ones.
    """
    found: list[Rule] = []
    for rule in rules:
        if not follows(rule, [*known, *found]):
            found.append(rule)
    for rule in tuple(found):
        rest = [other for other in found if other is not rule]
        if follows(rule, [*known, *rest]):
            found = rest
    return found


def follows(
    rule: Rule, others: Sequence[Rule], rounds: int = ROUNDS, most_nodes: int = MOST_NODES
) -> bool:
    """Whether a rule is derived from others, in so many rounds and with so many calls at most; one
    of any dims in front for one of them and for two, as it is proved.
    """
    starred = any(own.sizes[:1] == (LEAD,) for own in rule.inputs)
    leads = LEADS if starred else LEADS[:1]
    return all(_follows(rule, others, lead, rounds, EGraph(most_nodes)) for lead in leads)


def _follows(rule: Rule, others: Sequence[Rule], lead: int, rounds: int, graph: EGraph) -> bool:
    """The same where `*` stands for `lead` dims."""
    sizes = {name: dim(name) for name in names_at(rule, lead)}
    front = tuple(dim(f"{LEAD}{i}") for i in range(lead))
    inputs = {}
    for own in rule.inputs:
        shape = tuple(size_in(s, sizes, ONE) for s in own.sizes if not isinstance(s, str))
        inputs[own.name] = graph.input(
            own.name, (*front, *shape) if own.sizes[:1] == (LEAD,) else shape
        )
    pairs = [
        tuple(graph.add(term, inputs, sizes) for term in sides)
        for sides in zip(rule.left, rule.right, strict=True)
    ]

    def all_equal() -> bool:
        return all(graph.find(one) == graph.find(other) for one, other in pairs)

    for _ in range(rounds):
        if all_equal() or graph.saturate(others, 1):
            break
    return all_equal()


def _generality(rule: Rule) -> tuple[int, int, int, str]:
    calls = sum(len(list(calls_in(side))) for side in (*rule.left, *rule.right))
    return calls, -len(rule.inputs), -len(rule.extents), rule.id


def _size(size: Size, names: dict[str, str]) -> Size:
    return tuple(tuple(names.setdefault(n, f"s{len(names)}") for n in block) for block in size)


def _arg(arg: Arg, names: dict[str, str], sizes: dict[str, str]) -> Arg:
    if isinstance(arg, Name):
        return Name(names[arg.name])
    if isinstance(arg, Extent):
        return Extent(_size(arg.size, sizes))
    if isinstance(arg, tuple):
        return tuple(_arg(own, names, sizes) for own in arg)
    if isinstance(arg, Term):
        return Term(arg.op, tuple(_arg(own, names, sizes) for own in arg.args), arg.result)
    return arg
