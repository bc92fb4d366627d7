"""Hill climbing on the simulator: random changes of the best plan, whatever a model says of them.

A model stands for one mesh and sees neither when a gradient is ready nor what lives for a moment.
Here layouts, storage, recomputation, mesh and microbatches of a plan change as
`docs/explanation/search.md` allows; a plan that is no worse is kept, and the next change starts
from it. One that holds more than the limit is worse by so much that the way to one that fits pays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from operator import eq
from random import Random

from parloom.errors import LayoutError, VerifyError
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.ops import Rule
from parloom.ir.pcg import PCG, PParameter
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    ParameterDecision,
    one_stage,
)
from parloom.ir.step_program import as_sent
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.quantization import INT8, REAL
from parloom.search.choices import Place
from parloom.search.compose import policy_of
from parloom.search.conflicts import broken
from parloom.search.contexts import SimulatedPlan
from parloom.search.meshes import NAMES
from parloom.search.program import Axes, Program
from parloom.search.request import Request
from parloom.search.storage import Level, chunked_dim, level_of, nested
from parloom.search.work import Work

# Operators of plans that are simulated in all, the most plans, and the fewest that are worth it.
OPERATORS, MOST, FEWEST = 40_000, 600, 120
# So many plans in all, and that are no better one after the other, for each operator and weight.
PLANS, PATIENCE = 16, 4
# How likely an axis spreads from an operator to one that shares a value with it.
SPREADS = (0.0, 0.5, 0.9, 1.0)
# The share of the calls of a block that change together; 0: one.
SHARES = (0.0, 0.25, 0.5, 1.0)
# The share by which a plan must be better to be counted as such.
BETTER = 3e-4
# A plan that holds a percent more than the limit counts as slower by so many percent.
ABOVE = 4.0
Layouts = tuple[Mapping[str, Axes], ...]
Stored = Mapping[str, Level]


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that is being changed: axes on factors by operator of the program, storage by weight
    and recomputation by block call. `dim` of its levels says nothing.
    """

    mesh: Mesh
    layouts: Layouts
    stored: Stored
    remade: Mapping[str, ActivationDecision]
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class End:
    """A value as an operator has it: the factors of each dim."""

    operator: int
    dims: tuple[tuple[str, ...], ...]


def cost(found: SimulatedPlan, limit_bytes: int) -> float:
    """What climbing lowers: the step, or more than it where it does not fit."""
    return float(found.step_ps * max(1.0, found.peak_bytes / limit_bytes) ** ABOVE)


def climbed(
    request: Request, program: Program, start: SimulatedPlan, work: Work
) -> Iterator[SimulatedPlan]:
    """Plans that fit, each faster than the one before and than `start`, if that fits; `program` is
    that of the whole batch. Of graphs of which few plans could be simulated there are none.
    """
    each = max(1, sum(1 for _ in request.graph.flat()))
    tries = OPERATORS // each
    if tries >= FEWEST:
        yield from Climb(request, program, start, work).run(tries)


class Climb:
    """Changes one plan; `best` is the one so far that costs least."""

    def __init__(
        self, request: Request, program: Program, start: SimulatedPlan, work: Work
    ) -> None:
        self.request, self.program, self.best, self.work = request, program, start, work
        self.rng = Random(request.seed)
        self.counts = request.microbatch_counts(program.factored)
        self.changes = Changes(program, self.counts, self.rng, request.quantizes)
        # Weights as they lie in the plan that is changed, and in the last one that was simulated.
        self.homes: Mapping[str, PParameter] = {}
        self.latest = self.homes

    def run(self, tries: int) -> Iterator[SimulatedPlan]:
        """Try so many changes; what fits and is faster."""
        sites = len(self.program.operators) + len(self.program.weights)
        draft, left = self.draft(self.best.decisions), PATIENCE * sites
        for _ in range(min(tries, MOST, PLANS * sites)):
            left -= 1
            if left < 0:
                break
            changed = self.changes.any(draft)
            found = self._played(changed) if changed != draft else None
            if found is None or self._cost(found) > self._cost(self.best):
                continue
            if self._cost(found) < self._cost(self.best) * (1 - BETTER):
                left = PATIENCE * sites
            better = self._cost(found) < self._cost(self.best)
            draft, self.best, self.homes = self.draft(found.decisions), found, self.latest
            if better and found.peak_bytes <= self.request.limit_bytes:
                yield found

    def _cost(self, found: SimulatedPlan) -> float:
        """From a plan that fits, none leads to one that does not."""
        limit = self.request.limit_bytes
        if self.best.peak_bytes <= limit < found.peak_bytes:
            return inf
        return cost(found, limit)

    def draft(self, decisions: Decisions) -> Draft:
        """A plan as it can be changed."""
        found: dict[int, Mapping[str, Axes]] = {}
        for node in decisions.nodes:
            found.setdefault(self.program.index[node.key], dict(node.factors))
        return Draft(
            decisions.mesh,
            tuple(found.get(index, {}) for index in range(len(self.program.operators))),
            {p.name: replace(level_of(p), dim=0) for p in decisions.parameters},
            {a.prefix: a for a in decisions.activations},
            decisions.num_microbatches,
        )

    def _played(self, draft: Draft) -> SimulatedPlan | None:
        """A draft simulated; None where it is not legal or breaks a pin."""
        request, graph = self.request, self.request.graph
        try:
            decisions, pcg = self.lowered(draft)
            if broken(request.pinned, graph, decisions) is not None:
                return None
            self.work.spend()
            found = SimulatedPlan(
                decisions, request.machine.predict(pcg, decisions, request.optimizer)
            )
            if self._cost(found) <= self._cost(self.best):
                verify_decisions(graph, decisions, self.program.factored)
                verify_pcg(pcg)
        except (LayoutError, VerifyError):
            return None
        return found

    def lowered(self, draft: Draft) -> tuple[Decisions, PCG]:
        """A draft as a plan says it: weights are in chunks over axes that replicate them.

        Raises `LayoutError` where a layout is not legal.
        """
        like = self.homes if draft.mesh == self.best.decisions.mesh else {}
        while True:
            parameters = (
                _stored(like[name], level, draft.mesh)
                for name, level in draft.stored.items()
                if name in like
            )
            decisions = replace(
                self.best.decisions,
                stages=one_stage(draft.mesh),
                nodes=tuple(
                    NodeDecision(key, tuple(draft.layouts[index].items()))
                    for key, index in self.program.index.items()
                ),
                parameters=tuple(p for p in parameters if level_of(p).says),
                activations=tuple(draft.remade.values()),
                num_microbatches=draft.num_microbatches,
            )
            pcg = lower(self.request.graph, decisions, factored=self.program.factored)
            self.latest = {p.input.target: p for p in pcg.parameters}
            known = (name in like and like[name].layout for name in draft.stored)
            if all(map(eq, known, (self.latest[name].layout for name in draft.stored))):
                return as_sent(pcg) if decisions.sent_dtypes else decisions, pcg
            like = self.latest


def _stored(weight: PParameter, level: Level, mesh: Mesh) -> ParameterDecision:
    """Storage of a weight over those axes of `level` that replicate it."""
    home, shape = weight.layout, weight.input.value.spec.shape
    parts = (level.weight, level.gradient, level.optimizer)
    first, second, third = (tuple(a for a in axes if a not in home.axes) for axes in parts)
    dim = chunked_dim(home, shape, third, mesh)
    weight_sent = level.weight_sent if first else ""
    there = replace(level, weight=first, gradient=second, optimizer=third, dim=dim)
    return replace(there, weight_sent=weight_sent).decision(weight.input.target)


class Changes:
    """Random changes of drafts."""

    def __init__(
        self, program: Program, counts: Sequence[int], rng: Random, quantizes: bool = False
    ) -> None:
        self.program, self.counts, self.rng, self.quantizes = program, counts, rng, quantizes
        self.rules = [operator.rule for operator in program.operators]
        self.split = [index for index, rule in enumerate(self.rules) if rule.shardable]
        self.neighbors = _neighbors(program)
        self.weights = [w for w in program.weights if w.spec.shape and w.targets]
        self.trained = {t: w.trainable for w in program.weights for t in w.targets}
        self.blocks = [
            (block, calls)
            for block in program.blocks
            if (calls := [p for p in block.prefixes if policy_of(program, p) is None])
        ]
        every: tuple[tuple[Callable[[Draft], Draft], int, bool], ...] = (
            (self.relaid, 8, bool(self.split)),
            (self.restored, 6, bool(self.weights)),
            (self.remade, 5, bool(self.blocks)),
            (self.remeshed, 4, True),
            (self.recounted, 1, len(counts) > 1),
        )
        self.kinds = [(change, often) for change, often, some in every if some]

    def any(self, draft: Draft) -> Draft:
        """One to three of them."""
        kinds, often = zip(*self.kinds, strict=True)
        for change in self.rng.choices(kinds, often, k=self.rng.choice((1, 1, 1, 1, 2, 2, 3))):
            draft = change(draft)
        return draft

    def relaid(self, draft: Draft) -> Draft:
        """An axis on other factors of an operator, and of others that share values with it."""
        rng, index = self.rng, self.rng.choice(self.split)
        axes = [axis.name for axis in draft.mesh.axes if axis.size > 1]
        if not axes:
            return draft
        axis, place = rng.choice(axes), rng.choice(self.rules[index].places)
        likely, layouts = rng.choice(SPREADS), list(draft.layouts)
        pending, seen = [(index, place)], {index}
        while pending:
            index, place = pending.pop(rng.randrange(len(pending)))
            changed = _placed(self.rules[index], layouts[index], draft.mesh, axis, place)
            if changed is None:
                continue
            layouts[index] = changed
            for mine, its in self.neighbors.get(index, ()):
                if its.operator in seen or rng.random() >= likely:
                    continue
                there = _along(mine, its, place)
                if there is not None and there in self.rules[its.operator].places:
                    seen.add(its.operator)
                    pending.append((its.operator, there))
        return replace(draft, layouts=tuple(layouts))

    def restored(self, draft: Draft) -> Draft:
        """Other storage of one weight, of equal ones, of those alike in shape, or of all."""
        rng = self.rng
        sizes = [w.count * w.spec.num_elements for w in self.weights]
        (weight,) = rng.choices(self.weights, rng.choice((None, sizes)))
        shaped = [w for w in self.weights if len(w.spec.shape) == len(weight.spec.shape)]
        among = rng.choice(([weight], [weight], shaped, self.weights))
        targets = [target for w in among for target in w.targets]
        if among == [weight] and rng.random() < 0.5:
            targets = [rng.choice(targets)]
        axes = tuple(a.name for a in draft.mesh.axes if a.size > 1 and rng.random() < 0.67)
        alike = (axes,) * 3, ((), axes, axes), ((), (), axes)
        level = Level(*rng.choice((((),) * 3, rng.choice(alike), rng.choice([*nested(axes)]))))
        if self.quantizes and weight.spec.dtype in REAL:
            sent = rng.choice(("", INT8)), rng.choice(("", INT8))
            level = replace(level, weight_sent=sent[0], gradient_sent=sent[1])
        whole = Level(*(level.weight,) * 3, weight_sent=level.weight_sent)
        stored = dict(draft.stored) | {t: level if self.trained[t] else whole for t in targets}
        return replace(draft, stored=stored)

    def remade(self, draft: Draft) -> Draft:
        """Some calls of a block keep all, recompute all, or change one value or redistribution."""
        rng, (block, calls) = self.rng, self.rng.choice(self.blocks)
        count = max(1, int(rng.choice(SHARES) * len(calls)))
        start = rng.choice((0, rng.randrange(len(calls) - count + 1)))
        keys = [self.program.operators[index].node.key for index, _ in block.operators]
        inputs = [v.name for v in self.program.graph.by_name[block.function].inputs]
        how = rng.choice(("keep", "whole", "value", "value", "value", "move", "move"))
        name = rng.choice(keys if how == "value" else [*keys, *inputs])
        remade = dict(draft.remade)
        for prefix in calls[start : start + count]:
            own = remade.pop(prefix, ActivationDecision(prefix, "recompute"))
            values, moves = set(own.values), set(own.moves)
            if how in ("value", "move"):
                (values if how == "value" else moves).symmetric_difference_update({name})
            listed = replace(own, values=tuple(values), moves=tuple(moves))
            if how == "whole":
                remade[prefix] = ActivationDecision(prefix, "recompute")
            elif how != "keep" and listed.lists:
                remade[prefix] = listed
        return replace(draft, remade=remade)

    def recounted(self, draft: Draft) -> Draft:
        """The next number of microbatches, up or down."""
        at = self.counts.index(draft.num_microbatches) + self.rng.choice((-1, 1))
        at = min(max(at, 0), len(self.counts) - 1)
        return replace(draft, num_microbatches=self.counts[at])

    def remeshed(self, draft: Draft) -> Draft:
        """Other axes."""
        mesh, origin = _recut(draft.mesh, self.rng)
        return _on(draft, mesh, origin, self.rules)


def _recut(old: Mesh, rng: Random) -> tuple[Mesh, Sequence[str]]:
    """A mesh with an axis cut in two, two joined, the size of two shifted, or two exchanged; and
    for each of its axes the one of `old` whose place it takes, which has some of its devices.
    """
    primes = [prime for axis in old.axes for prime in axis.primes]
    owners = [axis.name for axis in old.axes for _ in axis.primes]
    cuts = {at for at in range(1, len(primes)) if owners[at - 1] != owners[at]}
    free = [at for at in range(1, len(primes)) if at not in cuts]
    how = rng.choice(("cut", "join", "shift", "exchange"))
    if how in ("join", "shift") and cuts:
        cuts.remove(rng.choice(sorted(cuts)))
    if how in ("cut", "shift") and free and len(cuts) + 1 < len(NAMES):
        cuts.add(rng.choice(free))
    ends = [0, *sorted(cuts), len(primes)]
    parts = [range(a, b) for a, b in pairwise(ends)]
    mesh = Mesh(
        tuple(
            MeshAxis(name, tuple(primes[i] for i in part))
            for name, part in zip(NAMES, parts, strict=False)
        )
    )
    origin = [owners[rng.choice(part)] if part else "" for part in parts]
    if how == "exchange" and len(origin) > 1:
        one, two = rng.sample(range(len(origin)), 2)
        origin[one], origin[two] = origin[two], origin[one]
    return mesh, origin


def _on(draft: Draft, mesh: Mesh, origin: Sequence[str], rules: Sequence[Rule]) -> Draft:
    """`draft` on `mesh`, whose axes are where those of `origin` were, as far as they divide."""

    def renamed(axes: Axes) -> Axes:
        return tuple(n for a in axes for n, o in zip(mesh.names, origin, strict=True) if o == a)

    layouts = []
    for rule, factors in zip(rules, draft.layouts, strict=True):
        found: Mapping[str, Axes] = {}
        for name, old in zip(mesh.names, origin, strict=True):
            place = tuple(factor for factor, axes in factors.items() if old in axes)
            found = _placed(rule, found, mesh, name, place) or found
        layouts.append(found)
    stored = {
        name: replace(
            x,
            weight=renamed(x.weight),
            gradient=renamed(x.gradient),
            optimizer=renamed(x.optimizer),
        )
        for name, x in draft.stored.items()
    }
    return replace(draft, mesh=mesh, layouts=tuple(layouts), stored=stored)


def _neighbors(program: Program) -> Mapping[int, Sequence[tuple[End, End]]]:
    """For each operator the ends of values that it shares with others."""
    found: dict[int, list[tuple[End, End]]] = {}
    for flow in program.flows:
        ends = [
            End(reader.operator, program.operators[reader.operator].rule.operands[reader.operand])
            for reader in flow.readers
        ]
        if flow.operator >= 0:
            made = program.operators[flow.operator].rule.results[flow.result]
            ends.append(End(flow.operator, made))
        for mine in ends:
            found.setdefault(mine.operator, []).extend(
                (mine, its) for its in ends if its.operator != mine.operator
            )
    return found


def _placed(
    rule: Rule, factors: Mapping[str, Axes], mesh: Mesh, axis: str, place: Place
) -> Mapping[str, Axes] | None:
    """`factors` with `axis` on those of `place` alone; None where it does not divide one."""
    found = {factor: tuple(a for a in axes if a != axis) for factor, axes in factors.items()}
    for factor in place:
        on = {*found.get(factor, ()), axis}
        found[factor] = tuple(name for name in mesh.names if name in on)
        if rule.size(factor) % mesh.size(found[factor]):
            return None
    return {factor: axes for factor, axes in found.items() if axes}


def _along(mine: End, its: End, place: Place) -> Place | None:
    """The factors of the other end of a value on the dims that have those of `place`; None where
    it has none there.
    """
    found = set(_matched(mine, its, place))
    return tuple(sorted(found)) if found or not place else None


def _matched(mine: End, its: End, place: Place) -> Iterator[str]:
    for here, there in zip(mine.dims, its.dims, strict=True):
        for position, name in enumerate(here):
            if name in place and position < len(there):
                yield there[position]
