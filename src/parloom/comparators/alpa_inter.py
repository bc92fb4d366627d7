"""Alpa's inter-operator pass (Zheng et al., OSDI 2022, section 5): layers, and the stages that a
dynamic program makes of them. `docs/explanation/comparators.md` says what differs here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from parloom.comparators.layers import chain_of, clustered, layers_of
from parloom.comparators.slices import Option, sliced, total_ps
from parloom.comparators.stage_costs import Costs, Form, Ranges, costs_of, own_plan
from parloom.cost.simulate import Simulator
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import (
    GLOBAL,
    Decisions,
    NodeDecision,
    ParameterDecision,
    Stage,
    one_stage,
)
from parloom.search.meshes import logical_meshes
from parloom.search.request import Request, Say

# Layers are as many as there are devices, but at least and at most so many: the paper's runs have 6
# to 16.
LAYERS = 8, 16
# Where no number of microbatches is asked for: one for each device, and about so many.
FOR_EACH = 4
# A range of layers is taken to need at least this share of what they take one by one on one device,
# divided by the devices: together they lack transfers, and parts of an operator may take a little
# less than all of it. It is no bound: a few ranges of small random graphs take a quarter of that.
JOINED = 0.8
Ways = Callable[[Ranges, Graph, int, Decisions], Iterator[Decisions]]
"""Plans of a stage, by its graph, on so many devices; `Ranges` knows the other stages."""


@dataclass(frozen=True, slots=True)
class Way:
    """A plan of a stage of some form, and what it costs."""

    form: Form
    plan: Decisions
    costs: Costs


def alpa_inter(request: Request, base: Decisions, say: Say) -> Iterator[Decisions]:
    """Stages of one device each: pipelines with no parallelism inside of operators (section 8.1).

    Raises `InputError` where items do not make so many stages.
    """
    devices = request.cluster.num_devices

    def ways(ranges: Ranges, graph: Graph, size: int, base: Decisions) -> Iterator[Decisions]:
        (mesh,) = logical_meshes(part_of(request.cluster, size))
        yield replace(base, stages=one_stage(mesh))

    yield from pipelines("alpa_inter", request, base, 2 * devices, (1,), ways, say)


def pipelines(
    method: str,
    request: Request,
    base: Decisions,
    num_layers: int,
    sizes: Sequence[int],
    ways: Ways,
    say: Say,
) -> Iterator[Decisions]:
    """The best stages of `sizes` devices in as many microbatches as asked for.

    Raises `InputError` where samples do not divide, and where layers do not make so many stages.
    """
    layers, devices = model_layers(request.graph, num_layers), request.cluster.num_devices
    if len(layers) * max(sizes) < devices:
        raise InputError(
            f"{method}: the model has {len(layers)} layers, which do not make {devices} stages, one"
            " each device; use fewer devices, or --method alpa"
        )
    for count in microbatch_counts(request, base):
        counted = replace(base, num_microbatches=count)
        search = StageSearch(request, counted, layers, sizes, ways)
        found = search.best()
        if found is not None:
            words = " + ".join(f"{o.last - o.first} on {o.size}" for o in found)
            seconds = total_ps(found, count) / 1e12
            say(f"{method}: {count} microbatches, layers {words}: {seconds:.4g} s")
            yield search.plan(found)


def model_layers(graph: Graph, count: int) -> tuple[tuple[str, ...], ...]:
    """The items of at most `count` layers."""
    chain = chain_of(graph, factorize(graph))
    return layers_of(chain, clustered(chain, count))


def microbatch_counts(request: Request, base: Decisions) -> tuple[int, ...]:
    """The number of microbatches of `base`; where it has one, the legal ones that are nearest to
    one and to `FOR_EACH` for each device.

    Raises `InputError` where samples do not divide into as many.
    """
    asked, devices = base.num_microbatches, request.cluster.num_devices
    if asked == 1:
        legal = request.microbatch_counts(factorize(request.graph))
        wanted = (devices, devices * FOR_EACH)
        return tuple(dict.fromkeys(min(legal, key=lambda n: (abs(n - w), n)) for w in wanted))
    if request.batch_semantics == GLOBAL:
        known = legal_microbatches(factorize(request.graph)).counts
        if asked not in known:
            raise InputError(
                f"no plan of {asked} microbatches: the samples do not divide into them"
            )
    return (asked,)


class StageSearch:
    """Stages of one number of microbatches. A range of layers is played on so many devices only
    where the dynamic program chooses it at the least that it may take; equal ranges are played
    once.
    """

    def __init__(
        self,
        request: Request,
        base: Decisions,
        layers: Sequence[Sequence[str]],
        sizes: Sequence[int],
        ways: Ways,
    ) -> None:
        self.request, self.base = request, base
        self.ranges = Ranges(request.graph, factorize(request.graph), base, layers)
        self.count, self.ways_of = len(layers), ways
        self.devices, self.player = request.cluster.num_devices, Simulator()
        self.parts: dict[int, Cluster] = {size: part_of(request.cluster, size) for size in sizes}
        self.known: dict[tuple[object, int], tuple[Way, ...]] = {}
        self.options: dict[tuple[int, int, int], list[Option]] = {}
        self.open: set[tuple[int, int, int]] = set()
        self._begin()

    def _begin(self) -> None:
        """The least that every range may take on every number of devices."""
        least = [self._alone_ps(layer) for layer in range(self.count)]
        for last in range(1, self.count + 1):
            for first in range(last):
                for size in self.parts:
                    latency_ps = round(JOINED * sum(least[first:last])) // size
                    option = Option(first, last, size, latency_ps, self.base.num_microbatches)
                    self.options[first, last, size] = [option]
                    self.open.add((first, last, size))

    def _alone_ps(self, layer: int) -> int:
        """What a layer takes on one device."""
        cluster, graph = part_of(self.request.cluster, 1), self.ranges.graph(layer, layer + 1)
        (mesh,) = logical_meshes(cluster)
        plan = replace(self.base, stages=one_stage(mesh))
        plan = own_plan(self.base, graph, plan, (), whole=False)
        return costs_of(self.request, cluster, graph, plan, self.player).latency_ps

    def best(self) -> tuple[Option, ...] | None:
        """The stages that take the least; where none fit, those that would, were there memory."""
        found = self._best(fitting=True)
        return self._best(fitting=False) if found is None else found

    def _best(self, *, fitting: bool) -> tuple[Option, ...] | None:
        while True:
            options = [option for some in self.options.values() for option in some]
            if not fitting:
                options = [replace(o, most=self.base.num_microbatches) for o in options]
            found = sliced(options, self.count, self.devices, self.base.num_microbatches)
            unknown = [o for o in found or () if (o.first, o.last, o.size) in self.open]
            if not unknown:
                return found
            for option in unknown:
                self._play(option.first, option.last, option.size)

    def _play(self, first: int, last: int, size: int) -> None:
        self.open.remove((first, last, size))
        options = self.options[first, last, size] = self.played(first, last, size)
        if not options:
            return
        # More layers on no more devices hold no less.
        most = max(option.most for option in options)
        for key in self.open:
            if key[0] <= first and key[1] >= last and key[2] <= size:
                self.options[key] = [replace(o, most=min(o.most, most)) for o in self.options[key]]

    def played(self, first: int, last: int, size: int) -> list[Option]:
        """What a range of layers takes on so many devices, by its plans."""
        return [
            Option(first, last, size, way.costs.latency_ps, way.costs.most, index)
            for index, way in enumerate(self.ways(first, last, size))
        ]

    def ways(self, first: int, last: int, size: int) -> tuple[Way, ...]:
        """All plans of a range of layers; none where it is no stage."""
        try:
            form = self.ranges.form(first, last)
        except LayoutError:
            return ()
        if (form.form, size) not in self.known:
            self.known[form.form, size] = tuple(self._found(form, first, last, size))
        return self.known[form.form, size]

    def _found(self, form: Form, first: int, last: int, size: int) -> Iterator[Way]:
        graph, whole = self.ranges.graph(first, last), last - first == self.count
        borrowed = self.ranges.borrowed(first)
        for plan in self.ways_of(self.ranges, graph, size, self.base):
            own = own_plan(self.base, graph, plan, borrowed, whole=whole)
            try:
                costs = costs_of(self.request, self.parts[size], graph, own, self.player)
            except LayoutError:  # as where samples do not divide over the devices
                continue
            yield Way(form, own, costs)

    def plan(self, found: Sequence[Option]) -> Decisions:
        """The plan of these stages, the largest on the first devices (section 5.2)."""
        begins, begin = dict[int, int](), 0
        for index in sorted(range(len(found)), key=lambda i: -found[i].size):
            begins[index] = begin
            begin += found[index].size
        stages, nodes = list[Stage](), list[NodeDecision]()
        stored: dict[str, ParameterDecision] = {}
        for index, option in enumerate(found):
            first, last, size = option.first, option.last, option.size
            way = self.ways(first, last, size)[option.way]
            own = self.ranges.form(first, last).renamed(way.plan, way.form)
            devices = range(begins[index], begins[index] + size)
            stages.append(Stage(self.ranges.items(first, last), (devices,), own.mesh))
            nodes += own.nodes
            for parameter in own.parameters:  # that of the first stage holds
                stored.setdefault(parameter.name, parameter)
        if len(stages) == 1:
            return replace(self.base, stages=one_stage(stages[0].mesh), nodes=tuple(nodes),
                           parameters=tuple(stored.values()))  # fmt: skip
        return replace(
            self.base,
            stages=tuple(stages),
            nodes=tuple(nodes),
            parameters=tuple(stored.values()),
            schedule="1f1b",
        )
