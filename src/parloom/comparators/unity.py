"""Unity: algebra and layouts in one search (Unger et al., OSDI'22, sections 4 and 5).

Graphs wait in a queue by the least step that any layouts give them. Of the fastest one every
substitution makes a graph, which waits, too, where it takes less than 1.05 times as long as the
best and was not seen before. A long function is searched in parts between post-dominators, across
which no substitution reaches. Layouts are chosen for each graph by dynamic programming, on equal
calls of a block once. `docs/explanation/comparators.md` says what differs here.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import inf

from parloom.comparators.best_first import ALPHA, Allowed, best_first
from parloom.comparators.fixed_form import proved, wanted
from parloom.comparators.plans import Whole, asked_program, planned
from parloom.cost.units import format_seconds
from parloom.cost.walk import Walker
from parloom.ir.graph import Function, Graph, Node
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.rewrite.substitutions import (
    Substitution,
    applied,
    directions,
    substitutions,
    takes_between,
    with_function,
)
from parloom.rewrite.take import Take
from parloom.search.fates import AskedFates
from parloom.search.layout_model import LayoutModel
from parloom.search.meshes import logical_meshes
from parloom.search.model import Floats
from parloom.search.prices import Known
from parloom.search.program import Program
from parloom.search.request import Request, Say
from parloom.search.rewritten import free_functions
from parloom.search.solve.columns import ColumnGeneration
from parloom.search.step_rows import Passes, ShadowPrices, row_prices
from parloom.search.storage import Level

# Graphs that are taken from queues in all (the artifact's budgets are 10 to 30), and operators of a
# part that is not cut (`base_optimize_threshold`).
POPPED, UNCUT = 20, 10
# How near layouts are to the best; steps of the search for a share of memory in the cost.
EXACT, HALVINGS = 1e-4, 10
# What a megabyte costs beside a millisecond.
BYTE_PS = 1e9 / 1e6


def unity(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """The best layouts on every mesh, of the form that the search finds.

    Raises `InputError` for a pin on a rewrite that applies nowhere, and where samples do not divide
    into as many microbatches as `base` has.
    """
    start = wanted(request)
    layouts = LeastSteps(start.request, base)
    search = Joint(start.request, layouts, request.budget or POPPED)
    for function in free_functions(start.request):
        search.rewrite(function, say)
    for plan in layouts.plans(search.graph, say):
        yield replace(plan, rewrites=(*start.rewrites, *map(str, search.takes)))


class Joint:
    """A search over forms of the graph of `request`, in which `popped` graphs are taken from the
    queues of each function.
    """

    def __init__(self, request: Request, layouts: "LeastSteps", popped: int) -> None:
        self.request, self.layouts, self.popped = request, layouts, popped
        self.graph, self.takes = request.graph, list[Take]()

    def rewrite(self, function: Function, say: Say) -> None:
        """Take the best form of a function that is found, part by part."""
        rules, takes, body = tuple[str, ...](), tuple[Take, ...](), function
        every = list(parts(self.graph, function))
        for names in every:
            search = best_first(
                self.graph, body, self._cost_ps, self._within(names, body),
                max(1, self.popped // len(every)),
            )  # fmt: skip
            found = list(search)
            first, last = (format_seconds(f.cost_ps / 1e12) for f in (found[0], found[-1]))
            say(f"unity: {function.name}: improved {len(found) - 1} times, {first} to {last}")
            for best in reversed(found[1:]):
                fired = tuple(dict.fromkeys((*rules, *best.rules)))
                chosen = takes_between(function, best.body, fired)
                if chosen is not None and proved(self.request, (*self.takes, *chosen)):
                    rules, takes, body = fired, chosen, best.body
                    break
            self.graph = with_function(self.graph, body)
        self.takes += takes

    def _cost_ps(self, body: Function) -> float:
        return self.layouts.cost_ps(with_function(self.graph, body))

    def _within(self, names: Collection[str], body: Function) -> Allowed:
        """Substitutions of values in a part, and of what these make, that pins leave."""
        others = {value.name for item in body.body for value in item.results} - {*names}
        pinned = self.request.pinned

        def allowed(found: Substitution) -> bool:
            values = {name for take in found.takes for _, name in take.taken}
            return values.isdisjoint(others) and pinned.allows_rewrite(found.rules)

        return allowed


def parts(graph: Graph, function: Function) -> Iterator[frozenset[str]]:
    """The values of a function in parts of about `UNCUT` operators, cut where all that comes later
    reads one value of what is before, and no substitution is on both sides.
    """
    made = {v.name: at for at, item in enumerate(function.body) for v in item.results}
    spans = []
    for found in substitutions(graph, function, directions(function)):
        body = applied(graph, function, found)
        if body is not None:
            left = made.keys() - {v.name for item in body.body for v in item.results}
            changed = {*left, *(name for take in found.takes for _, name in take.taken)}
            places = [made[name] for name in changed]
            spans.append((min(places), max(places)))
    cuts = [at for at in _single(function) if not any(first < at <= last for first, last in spans)]
    begin, count = 0, len(function.body)
    while begin < count:
        after = [at for at in cuts if at > begin] if count - begin > UNCUT else []
        end = min(after, key=lambda at: abs(at - begin - UNCUT), default=count)
        yield frozenset(name for name, at in made.items() if begin <= at < end)
        begin = end


def _single(function: Function) -> Iterator[int]:
    """The places before which only one value is made that is read behind them, and none is read
    that is read again.
    """
    first, last = dict[str, int](), dict[str, int]()
    made = {v.name: at for at, item in enumerate(function.body) for v in item.results}
    for at, item in enumerate(function.body):
        for name in item.refs if isinstance(item, Node) else item.args:
            first.setdefault(name, made.get(name, at))
            last[name] = at
    for name in function.outputs:
        last[name] = len(function.body)
        first.setdefault(name, made.get(name, 0))
    for at in range(1, len(function.body)):
        crossing = [name for name in first if first[name] < at <= last[name]]
        if len(crossing) == 1 and crossing[0] in made:
            yield at


@dataclass(frozen=True)
class Solved:
    """Layouts on one mesh, and what they cost (ps)."""

    layouts: LayoutModel
    values: tuple[int, ...]
    cost_ps: float

    def plan(self, base: Decisions) -> Decisions:
        """As a plan says them; weights are whole."""
        levels = [Level()] * len(self.layouts.program.weights)
        return planned(self.layouts, self.values, levels, base)


class LeastSteps:
    """The least steps of graphs in the place of that of `request`, on meshes of at most two axes:
    of the first graph on all of them, then on those on which it is about as fast as on the best.
    """

    def __init__(self, request: Request, base: Decisions) -> None:
        self.request, self.base = request, base
        self.every = tuple(logical_meshes(request.cluster, 2))
        self.meshes: tuple[Mesh, ...] = ()

    def cost_ps(self, graph: Graph) -> float:
        """The least sum of computing and messages, which is infinite where no layout is legal."""
        program, known = self._program(graph), Known()
        costs = {
            mesh: inf if (found := self._solved(program, mesh, known)) is None else found.cost_ps
            for mesh in self.meshes or self.every
        }
        least_ps = min(costs.values())
        if not self.meshes:
            self.meshes = tuple(m for m, ps in costs.items() if ps <= ALPHA * least_ps)
        return least_ps

    def plans(self, graph: Graph, say: Say) -> Iterator[Decisions]:
        """The plan of each mesh whose cost has the largest share of time with which it fits; that
        of least memory where none does.
        """
        program, known, request = self._program(graph), Known(), replace(self.request, graph=graph)
        for mesh in self.every:
            plan, share = self._fitting(program, mesh, known, request)
            if plan is not None:
                sizes = " x ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
                say(f"unity: mesh {sizes}: {share:.0%} of the cost is time, the rest memory")
                yield plan

    def _fitting(
        self, program: Program, mesh: Mesh, known: Known, request: Request
    ) -> tuple[Decisions | None, float]:
        """The plan with the largest share of time with which it fits, and that; 0 for none."""

        def plan(share: float) -> Decisions | None:
            found = self._solved(program, mesh, known, share)
            return None if found is None else found.plan(self.base)

        def fits(found: Decisions | None) -> bool:
            return found is None or request.fits(request.placed(found))

        fastest = plan(1.0)
        if fits(fastest):
            return fastest, 1.0
        best, low, high = plan(0.0), 0.0, 1.0
        for _ in range(HALVINGS if fits(best) else 0):
            middle = (low + high) / 2
            found = plan(middle)
            if fits(found):
                best, low = found, middle
            else:
                high = middle
        return best, low

    def _program(self, graph: Graph) -> Program:
        return asked_program(replace(self.request, graph=graph), self.base)

    def _solved(
        self, program: Program, mesh: Mesh, known: Known, share: float = 1.0
    ) -> Solved | None:
        """The layouts with the least of this share of time and what is left of memory."""
        request, base = self.request, self.base
        walker = Walker({}, mesh, request.cluster, request.machine.kernels)
        storage, fates = Whole(walker, base, request.optimizer), AskedFates(program)
        layouts = LayoutModel(program, walker, base, request.optimizer, known, (), storage, fates)
        passes = Passes(base.num_microbatches, hides=False)
        prices = _prices(passes, share)
        _, values = ColumnGeneration(layouts, passes).minimum(prices, EXACT)
        if not values:
            return None
        return Solved(layouts, values, float(layouts.evaluate(values, prices) @ prices))


def _prices(passes: Passes, share: float) -> Floats:
    """Prices of rows: this share of a step without overlap, the rest of bytes between passes."""
    time = row_prices(ShadowPrices(0.0, 0.0, 0.0), passes)
    memory = row_prices(ShadowPrices(0.0, 0.0, 0.0, BYTE_PS / 2, BYTE_PS / 2), passes) - time
    found: Floats = share * time + (1 - share) * memory
    return found
