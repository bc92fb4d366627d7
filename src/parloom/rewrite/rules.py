"""Substitution rules: two ways to compute the same tensors, proved for all shapes.

A rule says nothing of how it was found. `prove` is the proof by normal forms, `counterexample`
looks for shapes and numbers where both sides differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from math import prod
from random import Random
from typing import Any

import numpy as np

from parloom.errors import InputError
from parloom.ir.ops.algebra import Algebra
from parloom.rewrite.arithmetic import Arithmetic
from parloom.rewrite.modular import PRIME, Numbers
from parloom.rewrite.shapes import ARGUMENTS, Dims, Shapes
from parloom.rewrite.symbolic import NormalForms, NotExpressed, dim, tensor
from parloom.rewrite.terms import (
    LEAD,
    Input,
    Name,
    Term,
    calls_in,
    evaluate,
    extents_in,
    extents_of,
    parse_inputs,
    parse_term,
    size_in,
)

# How many dims `*` stands for in proofs: what is true of one and of two in a row is true of any,
# since all operators take them alike.
LEADS = (1, 2)
# Extents of counterexamples: all different, so that no two dims fit by chance.
EXTENTS = (2, 3, 5, 7, 4, 6, 8, 9)
MOST_ELEMENTS, MOST_DRAWS = 20_000, 20
WIDE = 64  # of dims beside one that windows are to fit into
# Operators of tensors of one rank: what they compute of others no kernel does.
OF_RANK = frozenset({"t", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "embedding",
                     "conv1d", "avg_pool1d"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """`left` and `right` are equal, output by output, for all inputs."""

    id: str
    inputs: tuple[Input, ...]
    left: tuple[Term | Name, ...]
    right: tuple[Term | Name, ...]

    @property
    def extents(self) -> tuple[str, ...]:
        """The names of all sizes: of inputs, and those that terms are told."""
        sides = (*self.left, *self.right)
        told = (name for side in sides for size in extents_in(side) for b in size for name in b)
        return tuple(dict.fromkeys((*extents_of(self.inputs), *told)))


def rule(identity: str, inputs: str, left: Sequence[str], right: Sequence[str]) -> Rule:
    """A rule from text; raises `InputError`."""
    declared = parse_inputs(inputs)
    sides = (tuple(parse_term(text, declared) for text in side) for side in (left, right))
    first, second = sides
    if len(first) != len(second):
        raise InputError(
            f"{identity}: {len(first)} outputs on the left, {len(second)} on the right"
        )
    return Rule(identity, declared, first, second)


def id_of(found: Rule, inputs: str, left: Sequence[str], right: Sequence[str]) -> str:
    """The id of a rule: its operators, and a hash of how it is written."""
    ops = dict.fromkeys(call.op for side in (found.left, found.right) for call in calls_in(side[0]))
    text = f"{inputs}: {left} = {right}"
    return f"{'_'.join(ops)}_{blake2b(text.encode(), digest_size=3).hexdigest()}"


def misfit(found: Rule) -> str:
    """Why no shapes fit a rule, as where an input has no declaration; empty where some do."""
    unknown = set(found.extents).difference(extents_of(found.inputs))
    if unknown:
        return f"{', '.join(sorted(unknown))}: neither an input nor a size of one"
    sizes = {name: dim(name) for name in names_at(found, 1)}
    inputs = {own.name: Dims(_shape(Shapes(), own, sizes, 1)) for own in found.inputs}
    sides = list[list[Any]]()
    for name, side in (("left", found.left), ("right", found.right)):
        try:
            sides.append(evaluate(side, Shapes(), inputs, sizes))
        except (NotExpressed, InputError, *ARGUMENTS) as error:
            return f"the {name} side cannot be computed: {type(error).__name__}: {error}"
        if not all(isinstance(made, Dims) for made in sides[-1]):
            return f"the {name} side is no tensor"
    return "" if sides[0] == sides[1] else "both sides have different shapes"


def prove(found: Rule) -> str:
    """Empty where both sides have equal normal forms; why not, otherwise."""
    has_lead = any(LEAD in own.sizes for own in found.inputs)
    for lead in LEADS if has_lead else LEADS[:1]:
        sizes = {name: dim(name) for name in (*found.extents, *_leads(lead))}
        try:
            inputs = {
                own.name: tensor(own.name, *_shape(NormalForms(), own, sizes, lead))
                for own in found.inputs
            }
            sides = [
                evaluate(side, NormalForms(), inputs, sizes) for side in (found.left, found.right)
            ]
        except (NotExpressed, *ARGUMENTS) as error:
            return f"no normal form: {error}"
        for index, (one, other) in enumerate(zip(*sides, strict=True)):
            if one.form != other.form:
                return f"output {index} has two normal forms"
    return ""


def with_lead(found: Rule) -> Rule | None:
    """A rule for any dims in the place of the first one of its first input, where that is proved;
    None where it is not, or where the rule has such dims already.
    """
    first = found.inputs[0].sizes[:1]
    size = first[0] if first else LEAD
    if isinstance(size, str) or len(size) != 1 or len(size[0]) != 1:
        return None
    sides = (*found.left, *found.right)
    if any(call.op in OF_RANK for side in sides for call in calls_in(side)):
        return None
    ((name,),) = size
    inputs = tuple(
        replace(own, sizes=(LEAD, *own.sizes[1:])) if own.sizes[:1] == first else own
        for own in found.inputs
    )
    told = (extent for side in sides for extent in extents_in(side))
    if name in extents_of(inputs) or any(name in block for size in told for block in size):
        return None
    general = Rule(found.id, inputs, found.left, found.right)
    return None if prove(general) else general


def only_moves(found: Rule) -> bool:
    """Whether both sides do the same arithmetic with the same numbers, so that they round alike."""
    tried = (_compared(found, seed, Arithmetic()) for seed in range(MOST_DRAWS))
    return next((not said for said in tried if said is not None), False)


def counterexample(found: Rule, seed: int) -> str:
    """Extents for which both sides differ modulo a prime; empty where there were none."""
    return _compared(found, seed, Numbers()) or ""


def with_room(found: Rule, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes with so many places more that windows over dims fit into them."""
    more = _room(found)
    return {name: size + more.get(name, 0) for name, size in sizes.items()}


@cache
def _room(found: Rule) -> Mapping[str, int]:
    """Places that a size must have beside the first one, of those that need some."""
    names = names_at(found, 1)

    def fits(name: str, size: int) -> bool:
        sizes = {**dict.fromkeys(names, WIDE), name: size}
        dims = {own.name: Dims(shape) for own, shape in shapes_at(found, sizes, 1)}
        try:
            evaluate((*found.left, *found.right), Shapes(1), dims, sizes)
        except NotExpressed:
            return False
        return True

    least = ((name, next((n for n in range(1, WIDE) if fits(name, n)), 1)) for name in names)
    return {name: size - 1 for name, size in least if size > 1}


def _compared(found: Rule, seed: int, algebra: Numbers) -> str | None:
    """What `difference` says of drawn extents; None where they are too large."""
    rng = Random(seed)
    lead = rng.choice(LEADS)
    names = names_at(found, lead)
    sizes = with_room(found, dict(zip(names, _extents(rng, len(names)), strict=True)))
    if any(prod(_shape(algebra, own, sizes, lead)) > MOST_ELEMENTS for own in found.inputs):
        return None
    return difference(found, sizes, lead, seed, algebra)


def difference(
    found: Rule,
    sizes: Mapping[str, int],
    lead: int,
    seed: int,
    algebra: Numbers = Numbers(),  # noqa: B008 - frozen
) -> str:
    """Which output differs modulo a prime where sizes are these; empty where none does."""
    numbers = np.random.default_rng(seed)
    inputs = {}
    for own, shape in shapes_at(found, sizes, lead):
        most = PRIME if own.below is None else size_in(own.below, sizes, 1)
        inputs[own.name] = numbers.integers(0, most, shape)
    try:
        sides = [evaluate(side, algebra, inputs, sizes) for side in (found.left, found.right)]
    except NotExpressed as error:
        return f"no shapes fit both sides: {error}"
    for index, (one, other) in enumerate(zip(*sides, strict=True)):
        if one.shape != other.shape or (one != other).any():
            said = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            return f"output {index} differs where {said}"
    return ""


def names_at(found: Rule, lead: int) -> tuple[str, ...]:
    """The sizes that a rule has where `*` stands for `lead` dims."""
    starred = any(own.sizes[:1] == (LEAD,) for own in found.inputs)
    return (*found.extents, *(_leads(lead) if starred else ()))


def shapes_at(
    found: Rule, sizes: Mapping[str, int], lead: int
) -> Iterator[tuple[Input, tuple[int, ...]]]:
    """The shape of each input where sizes are these."""
    return ((own, _shape(Numbers(), own, sizes, lead)) for own in found.inputs)


def _leads(number: int) -> Iterator[str]:
    return (f"{LEAD}{i}" for i in range(number))


def _extents(rng: Random, number: int) -> list[int]:
    """Different extents in any order, the least where they are few."""
    known = [*EXTENTS, *range(10, 10 + number)]
    return rng.sample(known[: max(number, 3)], number)


def _shape(
    algebra: Algebra[Any], own: Input, sizes: Mapping[str, Any], lead: int
) -> tuple[Any, ...]:
    """The dims of an input in an algebra."""
    found: list[Any] = []
    for size in own.sizes:
        if isinstance(size, str):
            found += [sizes[name] for name in _leads(lead)]
        else:
            found.append(size_in(size, sizes, algebra.one))
    return tuple(found)
