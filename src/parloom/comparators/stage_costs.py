"""What stages cost that are ranges of layers: each is lowered and played by itself."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from parloom.cost.actions import StageWriter
from parloom.cost.pipeline import StageActions, play_stage
from parloom.cost.simulate import Simulator
from parloom.cost.step import priced
from parloom.cost.timeline import Memory
from parloom.ir.factors import Factored
from parloom.ir.graph import Boundary, Call, Graph, Input
from parloom.ir.layout import Layout, Shard
from parloom.ir.lower import lower
from parloom.ir.lower_stages import staged
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.pcg import TIME
from parloom.ir.plan import Decisions, Stage
from parloom.ir.samples import num_samples, sample_dims
from parloom.ir.stages import ARRIVING, cut, operands, results, stage_items
from parloom.search.request import Request
from parloom.search.spread import spread, unfold


@dataclass(frozen=True)
class Form:
    """A stage up to its names: stages of one `form` cost the same, with the operators `keys` and
    the parameters `targets` in the place of each other's.
    """

    form: object
    keys: tuple[str, ...]
    targets: tuple[str, ...]

    def renamed(self, plan: Decisions, like: "Form") -> Decisions:
        """The plan of a stage of the form `like` for this one."""
        keys = dict(zip(like.keys, self.keys, strict=True))
        targets = dict(zip(like.targets, self.targets, strict=True))
        return replace(
            plan,
            nodes=tuple(replace(n, key=keys[n.key]) for n in plan.nodes),
            parameters=tuple(replace(p, name=targets[p.name]) for p in plan.parameters),
        )


class Ranges:
    """The graphs of stages that are ranges of `layers`, in as many microbatches as `base` has.

    Raises `LayoutError` where the model cannot be cut between layers.
    """

    def __init__(
        self,
        graph: Graph,
        factored: Factored,
        base: Decisions,
        layers: Sequence[Sequence[str]],
    ) -> None:
        self.whole, self.factored, self.base, self.layers = graph, factored, base, layers
        apart = (Stage(tuple(keys), (range(1),), Mesh(())) for keys in layers)
        parts = staged(factored, replace(base, stages=tuple(apart)))
        self.boundary, self._shared = parts.graphs[0].boundary, parts.shared
        self.graph = cache(self._graph)
        self.form = cache(self._form)

    def items(self, first: int, last: int) -> tuple[str, ...]:
        """The items of the layers from `first` to before `last`."""
        return tuple(key for layer in self.layers[first:last] for key in layer)

    def borrowed(self, first: int) -> frozenset[str]:
        """The parameters that a stage which begins with layer `first` may have of earlier ones."""
        return frozenset(name for name, at in self._shared.items() if at[0] < first)

    def _graph(self, first: int, last: int) -> Graph:
        """The graph of the layers from `first` to before `last` as a stage.

        Raises `LayoutError` where they are none.
        """
        ends = (0, first), (first, last), (last, len(self.layers))
        parts = cut(self.whole, [self.items(*end) for end in ends], empty=True)
        return replace(parts.graphs[1], boundary=self.boundary)

    def as_batch(self, graph: Graph) -> Graph:
        """The graph of a stage in which what another one made is an entry of the batch."""
        boundary = graph.boundary or Boundary()
        samples, inputs = dict(boundary.samples), list[Input]()
        for entry in graph.inputs:
            name = entry.value.name
            if entry.kind == ARRIVING:
                entry = replace(entry, kind="batch", trainable=name in boundary.flowing)
                if name in self._samples:
                    samples[entry.target] = self._samples[name]
            inputs.append(entry)
        return replace(graph, inputs=tuple(inputs), boundary=replace(boundary, samples=samples))

    @cached_property
    def _samples(self) -> Mapping[str, int]:
        """The dim of samples of every value of main that an operator of it or a block makes."""
        dims, count = sample_dims(self.factored), num_samples(self.factored)
        mesh = Mesh((MeshAxis(TIME, (), count),))
        seeds = {
            e.value.name: Layout((Shard(TIME, dim, e.value.spec.shape[dim] // count),))
            for e in self.whole.of_kind("batch")
            if (dim := dims.get(e.target)) is not None
        }
        unfolded = unfold(self.whole, self.factored, mesh)
        outer = {inner: name for name, inner in self.whole.flat_ids.items()}
        found = {}
        chosen = zip(unfolded.nodes, unfolded.rules, spread(unfolded, seeds), strict=True)
        for flat, rule, assignment in chosen:
            for index, name in enumerate(flat.results):
                shard = rule.result_layout(index, assignment, mesh).shard(TIME)
                if name in outer and shard is not None:
                    found[outer[name]] = shard.dim
        return found

    def _form(self, first: int, last: int) -> Form:
        """What tells the stage of these layers from others."""
        graph = self.graph(first, last)
        boundary = graph.boundary or Boundary()
        entries, number = {e.value.name: e for e in graph.inputs}, dict[str, int]()
        borrowed = self.borrowed(first)
        rows: list[object] = []
        targets: list[str] = []

        def crossing(name: str) -> object:
            return boundary.in_time.get(name), name in boundary.flowing

        def seen(name: str) -> int:
            if name not in number:
                number[name], entry = len(number), entries[name]
                alike = entry.kind, entry.value.spec, entry.trainable, entry.target in borrowed
                batch = entry.target if entry.kind == "batch" else ""
                rows.append((*alike, batch, crossing(name)))
                if entry.kind == "parameter":
                    targets.append(entry.target)
            return number[name]

        for item in graph.main.body:
            read = tuple(map(seen, operands(item)))
            number |= {name: len(number) + i for i, name in enumerate(results(item))}
            again = isinstance(item, Call) and item.prefix in graph.recompute
            rows.append((item.function if isinstance(item, Call) else item.key, read, again))
        rows += ((seen(n), crossing(n)) for n in graph.leaving)
        rows += ((seen(value), kind) for kind, value in (*graph.outputs, *graph.updates))
        for entry in graph.of_kind("parameter"):
            seen(entry.value.name)
        keys = tuple(flat.key for flat in graph.flat())
        return Form((tuple(rows), graph.loss is None), keys, tuple(targets))


@dataclass(frozen=True, slots=True)
class Costs:
    """What a stage takes for a microbatch, with its share of the reduction of gradients, and how
    many microbatches in flight fit into the memory of its devices.
    """

    latency_ps: int
    most: int


def costs_of(
    request: Request, cluster: Cluster, graph: Graph, plan: Decisions, player: Simulator
) -> Costs:
    """Play a stage on a part of the cluster. Raises `LayoutError` for an illegal plan."""
    pcg = lower(graph, plan)
    found = priced(pcg, cluster, plan, request.optimizer, request.machine.kernels)
    stage = play_stage("", StageWriter(pcg, cluster, found), player)
    forward, backward = (stage.actions[kind] for kind in "FB")
    reduced_ps = 1e12 * sum(transfer.total().comm_s for transfer in found.reductions)
    latency_ps = forward.ps + backward.ps + round(reduced_ps / plan.num_microbatches)
    return Costs(latency_ps, _most(stage, plan.num_microbatches, request.limit_bytes))


def _most(stage: StageActions, num_microbatches: int, limit_bytes: int) -> int:
    """How many microbatches in flight fit: base + gradients + in flight x what a forward pass
    leaves + what passes need beyond it; what updates the weights has to fit, too.
    """
    base, forward = sum(stage.base), stage.actions["F"].memory
    kinds = ("B first", "B", "B last") if num_microbatches > 1 else ("B",)
    passes = Memory()
    for kind in kinds:
        passes = passes.then(forward).then(stage.actions[kind].memory)
    step = passes
    for kind in ("REDUCE", "STEP", "GATHER"):
        step = step.then(stage.actions[kind].memory)
    if base + step.peak > limit_bytes:
        return 0
    held = sum(forward.net)
    if held <= 0:
        return num_microbatches
    return min(num_microbatches, 1 + (limit_bytes - base - passes.peak) // held)


def own_plan(
    base: Decisions, graph: Graph, plan: Decisions, borrowed: Collection[str], *, whole: bool
) -> Decisions:
    """`plan` as one of a stage: operators that other stages compute, too, are not split, and the
    parameters `borrowed` of earlier stages lie as this one computes with them.
    """
    owned = set(stage_items(graph))
    flats = {flat.key: flat.prefix or flat.node.key for flat in graph.flat()}
    prefixes = {item.prefix for item in graph.main.body if isinstance(item, Call)}
    return replace(
        base,
        stages=plan.stages,
        nodes=tuple(n for n in plan.nodes if whole or flats[n.key] in owned),
        parameters=tuple(p for p in plan.parameters if p.name not in borrowed),
        activations=tuple(a for a in base.activations if a.prefix in prefixes),
    )
