"""Tofu (Wang, Huang, Li; EuroSys 2019): partitions of the whole graph in two, one after another.

Each cut splits the devices into equal groups and chooses for every operator the one factor along
which it is split, so that least is communicated (section 5: dynamic programming on the coarsened
graph, recursively). Every operator and every tensor is split by every cut; a tensor that an
operator does not split along with itself is stored in parts and fetched where it is read. Cuts that
come first communicate least, so they are made across the slowest links.
`docs/explanation/comparators.md` says what differs here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parloom.comparators.plans import asked_program, communicated, joined, planned
from parloom.cost.walk import Walker
from parloom.ir.mesh import Cluster, Link, Mesh, MeshAxis
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Menus
from parloom.search.fates import AskedFates
from parloom.search.layout_model import LayoutModel
from parloom.search.prices import Known
from parloom.search.program import Axes, Operator, Program
from parloom.search.request import Request, Say
from parloom.search.single import Single
from parloom.search.solve.columns import ColumnGeneration
from parloom.search.step_rows import Passes
from parloom.search.storage import Level, StoragePrices, StoredWeight, stored_of

Chosen = Mapping[str, Axes]
# A link on which a byte takes a picosecond, the unit of all prices.
BYTES = Link(1e12, 0.0)
# How near a cut is to the least that can be sent.
EXACT = 1e-9


def tofu(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """One plan: a cut for every prime axis of the cluster.

    Raises `InputError` where samples do not divide into as many microbatches as `base` has.
    """
    program = asked_program(request, base)
    counted = bytes_as_seconds(request.cluster)
    chosen: Sequence[Chosen] = [{} for _ in program.operators]
    axes: tuple[MeshAxis, ...] = ()
    shared = Known()
    for index, prime in enumerate(reversed(request.cluster.prime_axes())):
        axes = (*axes, MeshAxis(f"cut{index}", (prime,)))
        walker = Walker({}, Mesh(axes), counted)
        found = cut(program, walker, base, request.optimizer, chosen, shared)
        chosen = found.chosen
        say(f"tofu: cut {index + 1} in {prime.size}: {found.sent_bytes / 1e6:.4g} MB a device")
    yield joined(planned(found.layouts, found.values, found.levels, base))


@dataclass(frozen=True)
class Cut:
    """Values of a layout model, and the bytes that a device sends in a step."""

    layouts: LayoutModel
    values: tuple[int, ...]
    sent_bytes: float

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """The assignment of every operator."""
        every = zip(self.layouts.options, self.values, strict=False)
        return tuple(dict(options.menu.choices[v].assignment) for options, v in every)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The storage of every kind of weight: the only one that there is."""
        layouts, program = self.layouts, self.layouts.program
        stored = (
            stored_of(program, weight, *layouts.weights.home(index, self.values))
            for index, weight in enumerate(program.weights)
        )
        return tuple(layouts.storage.options(each)[0][0] for each in stored)


def bytes_as_seconds(cluster: Cluster) -> Cluster:
    """The same devices behind links on which every collective takes a picosecond a byte that a
    device sends, so that prices count bytes.
    """
    levels = tuple(
        replace(level, link=BYTES, oversubscription=1.0, fabric="switch", reduces=False)
        for level in cluster.levels
    )
    return replace(cluster, levels=levels, backend="nccl")


def cut(
    program: Program,
    walker: Walker,
    base: Decisions,
    optimizer: Optimizer,
    chosen: Sequence[Chosen],
    shared: Known | None = None,
) -> Cut:
    """The best place of the last axis of a mesh, for operators that lie as `chosen` before.

    Where splitting every operator contradicts itself (weights that several operators read), some
    may stay as they are.
    """
    menus = Menus(program, Single(program.graph, program.factored, walker.mesh))
    prices = communicated(base.num_microbatches)
    for always in (True, False):
        given = [
            menus.of(
                index, _assignments(program.operators[index], walker.mesh, before, always=always)
            )
            for index, before in enumerate(chosen)
        ]
        storage, fates = _Parts(walker, base, optimizer), AskedFates(program)
        layouts = LayoutModel(program, walker, base, optimizer, shared, given, storage, fates)
        solver = ColumnGeneration(layouts, Passes(base.num_microbatches))
        sent_bytes, values = solver.minimum(prices, EXACT)
        if values:
            break
    return Cut(layouts, values, sent_bytes)


def _assignments(
    operator: Operator, mesh: Mesh, before: Chosen, *, always: bool
) -> Sequence[Chosen]:
    """The factors that the last axis divides after the cuts before; `always`: one of them, if any
    is left.
    """
    rule, axis = operator.rule, mesh.axes[-1]
    alone = [p[0] for p in rule.places if len(p) == 1 and p[0] in rule.shardable]
    found: list[Chosen] = [
        {**before, factor: (*before.get(factor, ()), axis.name)}
        for factor in alone
        if rule.size(factor) % (mesh.size(before.get(factor, ())) * axis.size) == 0
    ]
    return found if found and always else [*found, before]


class _Parts(StoragePrices):
    """Weights, gradients and optimizer states are all in parts: over whatever axes their operator
    does not split them, they are stored in chunks.
    """

    def _levels(self, weight: StoredWeight) -> Iterator[Level]:
        axes = self.free(weight)
        yield Level(axes, axes, axes, self.dim(weight, axes)) if axes else Level()
