"""Pins as the search asks them: by operator, parameter and block of one graph."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from parloom.errors import InputError
from parloom.ir.factors import Factored
from parloom.ir.graph import Call, Graph
from parloom.ir.layout import Layout
from parloom.ir.mesh import Mesh
from parloom.ir.ops import Rule
from parloom.ir.plan import ParameterDecision
from parloom.search.pins import ANY, PARTS, STAGES, WHOLE, Axes, Kind, Pin, chunks_of, hint

Allowed = Callable[[Mapping[str, Axes]], bool]
WHOLE_PLAN = (Kind.MESH, Kind.STAGES, Kind.REWRITE)
Place = tuple[str, str]  # block kind and key of an operator in it


@dataclass(frozen=True, slots=True)
class Subjects:
    """What a pin is about: operators by their places with the first full name of each, parameters,
    blocks. `others` counts calls that it does not name and that share a choice with one it names.
    """

    pin: Pin
    operators: tuple[tuple[Place, str], ...] = ()
    parameters: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    others: int = 0


@dataclass(frozen=True)
class Pinned:
    """All pins of a question about one graph."""

    subjects: tuple[Subjects, ...] = ()
    operators: Mapping[Place, tuple[Pin, ...]] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Pin, ...]] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """As they were given."""
        return tuple(s.pin for s in self.subjects)

    def only(self, pins: Sequence[Pin]) -> "Pinned":
        """These of them alone."""
        return _index(tuple(s for s in self.subjects if s.pin in pins))

    def without_rewrites(self) -> "Pinned":
        """Those of plans of a form whose rewrites are made."""
        return self.only([pin for pin in self.pins if pin.kind is not Kind.REWRITE])

    @property
    def names_mesh(self) -> bool:
        """Whether plans have to have a certain mesh."""
        return any(p.kind is Kind.MESH and not p.forbidden for p in self.pins)

    def allows_mesh(self, mesh: Mesh) -> bool:
        """Whether plans may have this mesh."""
        return all(p.allows_mesh(mesh) for p in self.pins if p.kind is Kind.MESH)

    @property
    def wanted_rewrites(self) -> tuple[Pin, ...]:
        """The pins that ask for rewrites."""
        rewrites = (pin for pin in self.pins if pin.kind is Kind.REWRITE)
        return tuple(pin for pin in rewrites if not pin.forbidden)

    @property
    def forbidden_rewrites(self) -> tuple[Pin, ...]:
        """The pins that forbid rewrites."""
        return tuple(pin for pin in self.pins if pin.kind is Kind.REWRITE and pin.forbidden)

    def allows_rewrite(self, rules: Collection[str]) -> bool:
        """Whether a value may be computed in another way by these rules."""
        return not any(pin.is_about(rules) for pin in self.forbidden_rewrites)

    def wants_rewrite(self, rules: Collection[str]) -> bool:
        """Whether values are to be computed in another way by one of these rules."""
        return any(pin.is_about(rules) for pin in self.wanted_rewrites)

    def allows_stages(self, count: int) -> bool:
        """Whether plans may have so many stages."""
        return all(p.allows_stages(count) for p in self.pins if p.kind is Kind.STAGES)

    def allowed(self, place: Place, rule: Rule, mesh: Mesh) -> Allowed | None:
        """Which assignments an operator may have; None for all."""
        pins = self.operators.get(place, ())
        if not pins:
            return None
        return lambda chosen: all(pin.allows_operator(rule, chosen, mesh) for pin in pins)


NONE = Pinned()


def allows_stored(
    pins: Iterable[Pin], layout: Layout, decision: ParameterDecision, mesh: Mesh
) -> bool:
    """Whether a parameter at home in `layout` may be stored so."""
    chunks = chunks_of(decision)
    return all(pin.allows_stored(layout, chunks, mesh) for pin in pins)


def resolve(pins: Sequence[Pin], graph: Graph, factored: Factored) -> Pinned:
    """What `pins` name in `graph`.

    Raises `InputError` for names and factors that there are not.
    """
    if not pins:
        return NONE
    names = _Names(graph, factored)
    return _index(tuple(names.subjects(pin) for pin in pins))


def _index(subjects: tuple[Subjects, ...]) -> Pinned:
    operators: dict[Place, tuple[Pin, ...]] = {}
    parameters: dict[str, tuple[Pin, ...]] = {}
    policies: dict[str, str] = {}
    for found in subjects:
        for place, _ in found.operators:
            operators[place] = (*operators.get(place, ()), found.pin)
        for name in found.parameters:
            parameters[name] = (*parameters.get(name, ()), found.pin)
        policies |= dict.fromkeys(found.blocks, found.pin.policy)
    return Pinned(subjects, operators, parameters, policies)


def clashes(pinned: Pinned) -> bool:
    """Whether a block is to be kept and to be recomputed."""
    return any(
        pinned.policies[block] != found.pin.policy
        for found in pinned.subjects
        for block in found.blocks
    )


class _Names:
    """The names that pins may use."""

    def __init__(self, graph: Graph, factored: Factored) -> None:
        self.flats = tuple(graph.flat())
        self.factored = factored
        self.blocks = tuple(i.prefix for i in graph.main.body if isinstance(i, Call))
        self.parameters = tuple(i.target for i in graph.of_kind("parameter"))
        self.trained = {i.target for i in graph.of_kind("parameter") if i.trainable}

    def subjects(self, pin: Pin) -> Subjects:
        """What `pin` names."""
        if pin.kind in WHOLE_PLAN:
            return Subjects(pin)
        if pin.kind is Kind.RECOMPUTATION:
            return Subjects(pin, blocks=self._blocks(pin))
        if pin.kind is Kind.STORAGE:
            return Subjects(pin, parameters=self._stored(pin))
        operators, others = self._operators(pin)
        if operators:
            return Subjects(pin, operators, others=others)
        return Subjects(pin, parameters=self._laid_out(pin))

    def _blocks(self, pin: Pin) -> tuple[str, ...]:
        found = tuple(b for b in self.blocks if _names(pin.name, b))
        if found:
            return found
        inside = [b for b in self.blocks if pin.name.startswith(f"{b}.")]
        if inside:
            raise InputError(
                f"{pin.text}: blocks are recomputed as a whole; write {inside[0]}="
                f"{pin.terms[0].where}"
            )
        if not self.blocks:
            raise InputError(f"{pin.text}: the model has no repeated blocks to recompute")
        raise InputError(f"{pin.text}: no block {pin.name!r}{hint(pin.name, list(self.blocks))}")

    def _stored(self, pin: Pin) -> tuple[str, ...]:
        found = [p for p in self.parameters if _names(pin.name, p)]
        if not found:
            raise InputError(f"{pin.text}: no parameter {pin.name!r}{self._near(pin.name)}")
        if all(term.what == "weights" for term in pin.terms):
            return tuple(found)
        trained = tuple(p for p in found if p in self.trained)
        if not trained:
            raise InputError(f"{pin.text}: {found[0]} is not trained: it has weights alone")
        return trained

    def _operators(self, pin: Pin) -> tuple[tuple[tuple[Place, str], ...], int]:
        """Operators that have what the pin speaks about, and how many calls it drags along."""
        named: dict[Place, str] = {}
        lacking: list[str] = []
        count = 0
        for flat in self.flats:
            if not (_names(pin.name, flat.key) or pin.name == flat.key.rpartition("#")[0]):
                continue
            rule = self.factored.rule(flat.function, flat.node)
            if all(term.factors(rule) for term in pin.terms):
                named.setdefault((flat.function, flat.node.key), flat.key)
                count += 1
            else:
                factors = ", ".join(f"{f} ({rule.size(f) or 'any'})" for f in rule.offered)
                lacking.append(f"{flat.key} has {factors or 'nothing to split'}")
        if lacking and not named:
            what = ", ".join(t.what or "nothing" for t in pin.terms)
            more = f", and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise InputError(f"{pin.text}: no factor or dim {what}: {'; '.join(lacking[:3])}{more}")
        calls = sum((f.function, f.node.key) in named for f in self.flats)
        return tuple(named.items()), calls - count

    def _laid_out(self, pin: Pin) -> tuple[str, ...]:
        found = tuple(p for p in self.parameters if fnmatchcase(p, pin.name))
        if not found and pin.name == STAGES:
            raise InputError(f"{pin.text}: no module is called so, and stages are a number")
        if not found:
            raise InputError(f"{pin.text}: nothing is called {pin.name!r}{self._near(pin.name)}")
        for term in pin.terms:
            if term.what != ANY and not term.what.startswith("dim"):
                raise InputError(
                    f"{pin.text}: {found[0]} is a parameter: write dim0:{term.where}, {WHOLE} or"
                    f" {PARTS}; its operator has factors"
                )
        return found

    def _near(self, name: str) -> str:
        keys = [flat.key for flat in self.flats]
        paths = [path for key in keys for path in _above(key) if path]
        return hint(name, list(dict.fromkeys([*paths, *self.parameters, *keys])))


def _names(pattern: str, name: str) -> bool:
    """Whether `pattern` is `name`, a module that holds it, or a glob of one of these."""
    return any(fnmatchcase(above, pattern) for above in (name, *_above(name)))


def _above(name: str) -> Iterable[str]:
    """The modules that hold an operator, parameter or block."""
    path, colon, _ = name.partition(":")
    parts = path.split(".")
    for count in range(len(parts) if colon else len(parts) - 1, 0, -1):
        yield ".".join(parts[:count])
