"""Pins: what a user fixes or forbids in a plan, as text.

    NAME=LAYOUT     `layers.0=n:x`   axis x splits factor n of the operators of layers.0

`docs/reference/pins.md` says all of it. A pin speaks about one of six things: operators, storage of
parameters, recomputation of blocks, the mesh, the number of stages, rewrites. Of several terms all
must hold; a forbidden layout is one of which all terms hold.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from types import MappingProxyType

from parloom.errors import InputError, nearest
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.plan import ParameterDecision
from parloom.rewrite.known import base_ids, case_names
from parloom.rewrite.pad import PADS
from parloom.rewrite.rewrites import is_rewrite, rule_names

Axes = tuple[str, ...]
Assignment = Mapping[str, Axes]
WHOLE, PARTS, ANY = "replicated", "sharded", ""
KEEP, RECOMPUTE = "keep", "recompute"
WORDS = frozenset({WHOLE, PARTS, KEEP, RECOMPUTE})
MESH, STAGES, REWRITE = "mesh", "stages", "rewrite"
PIPELINES = ("pipeline", "pipelines", STAGES)
NO_REWRITE = f"{REWRITE}=*"
"""What to forbid for no rewrites at all."""
# What of a parameter is stored, by the names that plans print, and by the attribute of a decision.
ROLES = MappingProxyType({"weights": "weight", "gradients": "gradient", "optimizer": "optimizer"})
DIM = re.compile(r"dim([0-9]+)")
RULE = re.compile(r"[\w*?\[\]]+")
RARE = re.compile(r"_along_[df]([4-9]|[0-9]{2})")  # rules that no message offers
NUMBER = re.compile(r"[0-9]{1,9}")
WORD = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*|{NUMBER.pattern}")
LAYOUTS = "FACTOR:AXIS, dim0:AXIS, replicated, sharded, weights:sharded, keep, recompute"
HINT = f"LAYOUT is one of {LAYOUTS}; as in layers.0=n:x; or mesh=2x4, stages=4, rewrite=RULE"


class Kind(Enum):
    """What a pin is about."""

    LAYOUT = "layout"
    STORAGE = "storage"
    RECOMPUTATION = "recomputation"
    MESH = "mesh"
    STAGES = "stages"
    REWRITE = "rewrite"


@dataclass(frozen=True, slots=True)
class Term:
    """`what` (a factor, `dim0`, a role, or nothing in particular) is split by `where`: an axis, a
    number of devices, anything (`sharded`), or nothing (`replicated`).
    """

    what: str
    where: str = PARTS

    def holds(self, axes: Axes, mesh: Mesh) -> bool:
        """Whether `axes` split it so; axes of one device split nothing."""
        split = {axis for axis in axes if mesh[axis].size > 1}
        if self.where in (WHOLE, PARTS):
            return bool(split) == (self.where == PARTS)
        if self.where.isdigit():
            return prod(mesh[axis].size for axis in split) == int(self.where)
        return self.where in axes

    def factors(self, rule: Rule) -> tuple[str, ...]:
        """The factors of an operator that it is about: those of a dim of the first result, the one
        of that name, or its parts where views have cut it (`n` into `n0`, `n1`). What is replicated
        is no part of a sum, and parts of sums are not split.
        """
        if self.what == ANY:
            return rule.offered if self.where == WHOLE else rule.shardable
        dim = DIM.fullmatch(self.what)
        if dim:
            dims = rule.results[0] if rule.results else ()
            return dims[int(dim[1])] if int(dim[1]) < len(dims) else ()
        names = [name for name, _ in rule.sizes]
        if self.what in (*names, *rule.offered):
            return (self.what,)
        return tuple(n for n in names if re.fullmatch(re.escape(self.what) + "[0-9]+", n))


@dataclass(frozen=True, slots=True)
class Pin:
    """What is asked of all that `name` names; forbidden: of none of it. `text` as it was given."""

    text: str
    name: str
    kind: Kind
    terms: tuple[Term, ...]
    forbidden: bool = False

    def allows_operator(self, rule: Rule, assignment: Assignment, mesh: Mesh) -> bool:
        """Whether an operator may be split so."""
        held = all(
            term.holds(tuple(a for f in term.factors(rule) for a in assignment.get(f, ())), mesh)
            for term in self.terms
        )
        return held != self.forbidden

    def allows_stored(self, layout: Layout, chunks: Mapping[str, Axes], mesh: Mesh) -> bool:
        """Whether a parameter may lie so: its compute layout, and the axes over which each role is
        stored in chunks beyond it.
        """
        held = []
        for term in self.terms:
            dim = DIM.fullmatch(term.what)
            if dim:
                axes = tuple(shard.axis for shard in layout.of_dim(int(dim[1])))
            else:
                axes = (*layout.axes, *chunks.get(term.what or "weights", ()))
            held.append(term.holds(axes, mesh))
        return all(held) != self.forbidden

    def allows_mesh(self, mesh: Mesh) -> bool:
        """Whether a plan may have these axes."""
        sizes = {axis.name: axis.size for axis in mesh.axes if not axis.steps}
        if self.terms[0].what == ANY:
            held = [str(n) for n in sizes.values()] == [term.where for term in self.terms]
        else:
            held = all(str(sizes.get(term.what)) == term.where for term in self.terms)
        return held != self.forbidden

    def allows_stages(self, count: int) -> bool:
        """Whether a plan may have so many."""
        return (int(self.terms[0].where) == count) != self.forbidden

    def is_about(self, rules: Collection[str]) -> bool:
        """Whether it names one of these rules, or a rule that one of them is a case of."""
        names = (name for rule in rules for name in (rule, *base_ids(rule)))
        return any(fnmatchcase(name, self.terms[0].where) for name in names)

    def covers(self, other: "Pin") -> bool:
        """Whether it names all rules that a pin on rewrites names."""
        own, given = self.terms[0].where, other.terms[0].where
        return own in ("*", given) or (set(given).isdisjoint("*?[") and self.is_about((given,)))

    @property
    def policy(self) -> str:
        """What a pin about recomputation leaves."""
        return RECOMPUTE if (self.terms[0].where == RECOMPUTE) != self.forbidden else KEEP


def chunks_of(decision: ParameterDecision) -> Mapping[str, Axes]:
    """The axes over which each role of a parameter is stored in chunks."""
    return {role: getattr(decision, name).axes for role, name in ROLES.items()}


def parse_pin(given: str, *, forbidden: bool = False) -> Pin:
    """Read `NAME=LAYOUT`; raises `InputError` that says how it is written."""
    flag = "--forbid" if forbidden else "--pin"
    text = f"{flag} {given}"
    name, equals, layout = (part.strip() for part in given.partition("="))
    if forbidden and not equals and name in PIPELINES:
        raise InputError(f"{text}: a pipeline has several stages; write --pin {STAGES}=1")
    if not equals or not name or not layout:
        raise InputError(f"{text}: write {flag} NAME=LAYOUT; {HINT}")
    words = [word.strip() for word in layout.strip("{}").split(",")]
    if name == MESH:
        return Pin(text, name, Kind.MESH, _mesh_terms(text, words), forbidden)
    if name == STAGES and len(words) == 1 and NUMBER.fullmatch(words[0]):  # no module of that name
        return Pin(text, name, Kind.STAGES, (Term(ANY, words[0]),), forbidden)
    if name == REWRITE and len(words) == 1 and RULE.fullmatch(words[0]) and words[0] not in WORDS:
        _check_rule(text, words[0])
        return Pin(text, name, Kind.REWRITE, (Term(ANY, words[0]),), forbidden)
    if words in ([KEEP], [RECOMPUTE]):
        return Pin(text, name, Kind.RECOMPUTATION, (Term(ANY, words[0]),), forbidden)
    terms = tuple(_term(text, word) for word in words)
    stored = [term.what in ROLES for term in terms]
    if any(stored) and not all(stored):
        raise InputError(f"{text}: layout and storage in one; give each a {flag} of its own")
    return Pin(text, name, Kind.STORAGE if all(stored) else Kind.LAYOUT, terms, forbidden)


def _check_rule(text: str, given: str) -> None:
    """Raise `InputError` unless there is a rewrite of that name, or one that it means as a glob."""
    if given == PADS or is_rewrite(given):
        return
    names, cases = [PADS, *rule_names()], case_names(given)
    near = [own for own in names if not RARE.search(own)]
    if set(given).isdisjoint("*?["):
        stem = given[: given.rfind("_") + 1]
        near += (own for own in cases if own.startswith(stem) and is_rewrite(own))
        raise InputError(f"{text}: no rule {given!r}{hint(given, near)}")
    meant = (own for own in chain(names, cases) if fnmatchcase(own, given))
    if not any(own == PADS or is_rewrite(own) for own in meant):
        raise InputError(f"{text}: no rule has a name like {given!r}{hint(given, near)}")


def _term(text: str, word: str) -> Term:
    what, colon, where = (part.strip() for part in word.partition(":"))
    if word in (WHOLE, PARTS):
        return Term(ANY, word)
    if not WORD.fullmatch(what) or what.isdigit() or (colon and not WORD.fullmatch(where)):
        raise InputError(f"{text}: {word!r} is no layout; {HINT}")
    if what in WORDS:
        raise InputError(f"{text}: {what} stands alone; {HINT}")
    if where.isdigit() and int(where) < 2:
        raise InputError(f"{text}: split over {where}: write {what}:{WHOLE} for what is whole")
    return Term(what, where or PARTS)


def _mesh_terms(text: str, words: list[str]) -> tuple[Term, ...]:
    """`2x4`, or `x:2,y:4`."""
    if len(words) == 1 and re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9})*", words[0]):
        return tuple(Term(ANY, size) for size in words[0].split("x"))
    terms = []
    for word in words:
        found = re.fullmatch(r"([A-Za-z_]\w*)[:=]([0-9]{1,9})", word)
        if found is None:
            raise InputError(
                f"{text}: {word!r} is no mesh; write sizes, outermost first, as mesh=2x4, or axes"
                " as mesh=x:2,y:4"
            )
        terms.append(Term(found[1], found[2]))
    return tuple(terms)


def hint(name: str, known: list[str]) -> str:
    """The nearest names, or the first few."""
    near = nearest(name, known)
    if near.startswith("; did"):
        return near
    return f"; there are {', '.join(known[:6])}{', ...' if len(known) > 6 else ''}"
