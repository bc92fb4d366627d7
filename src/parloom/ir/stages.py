"""Pipeline stages of a graph: each a graph of its own, and the values that cross between them.

A stage has items of main's body: operators by their keys, block calls by their prefixes. Items that
depend on no parameter, on no random number and on no buffer that a step writes (masks, tables of
positions, counts of tokens) belong to no stage: each stage computes those that it reads. So what is
summed over the batch before the first microbatch is known in every stage. All other items are in
exactly one stage, and no value goes to an earlier one, so that the stages form a directed acyclic
graph.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parloom.errors import CutError, LayoutError, nearest
from parloom.ir.graph import CACHE, Call, Function, Graph, Input, Node, Value
from parloom.ir.mesh import Mesh
from parloom.ir.ops import op_of
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    ParameterDecision,
    Storage,
    one_stage,
)

Item = Node | Call
ARRIVING = "arriving"
"""The kind of an input of a stage's graph that an earlier stage makes."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that stage `source` makes and the stages `targets` read."""

    value: Value
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A graph in stages: the graph of each, what crosses between them, and parameters that several
    stages read, by the user's name, with the stages: the first one owns them.
    """

    graphs: tuple[Graph, ...]
    crossings: tuple[Crossing, ...]
    shared: Mapping[str, tuple[int, ...]]


def item_key(item: Item) -> str:
    """The name of an item of main: an operator's key, or the module path of a block call."""
    return item.prefix if isinstance(item, Call) else item.key


def stage_items(graph: Graph) -> tuple[str, ...]:
    """The items that stages have, in execution order."""
    return tuple(item_key(item) for item in _Items(graph).owned)


def item_edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Which of the stages' items reads a value of which other one, by their places in
    `stage_items`: (that makes it, that reads it).
    """
    made: dict[str, int] = {}
    found: dict[tuple[int, int], None] = {}
    for index, item in enumerate(_Items(graph).owned):
        found.update(((made[name], index), None) for name in operands(item) if name in made)
        made.update((name, index) for name in results(item))
    return tuple(found)


def cut(graph: Graph, stages: Sequence[Sequence[str]], *, empty: bool = False) -> Cut:
    """`graph` in stages of these items; with `empty` a stage may have none.

    Raises `LayoutError` where an item is unknown, missing or in two stages, where a stage has none,
    and where a value would go to an earlier stage.
    """
    items = _Items(graph)
    return _Stages(items, _stage_of(items, stages, empty), len(stages)).cut()


def cut_plan(
    graph: Graph, decisions: Decisions, stages: Sequence[Sequence[str]] | None = None
) -> Cut:
    """The stages of a plan, or with these items, which may be none; each replica of the model has
    all items. Raises `LayoutError` as `cut` does, and for replicas that would write buffers.
    """
    items, empty = stages or [stage.items for stage in decisions.stages], stages is not None
    replicas = decisions.replicas
    if len(replicas) == 1:
        return cut(graph, items, empty=empty)
    if graph.buffer_updates:
        raise CutError(
            f"{graph.buffer_updates[0][0]} is computed from all samples of a step, and a replica"
            " sees some of them; leave out the microbatches of stages"
        )
    graphs: dict[int, Graph] = {}
    crossings: list[Crossing] = []
    for members in replicas:
        parts = cut(graph, [items[stage] for stage in members], empty=empty)
        graphs.update(zip(members, parts.graphs, strict=True))
        crossings += (
            Crossing(c.value, members[c.source], tuple(members[t] for t in c.targets))
            for c in parts.crossings
        )
    ordered = tuple(graphs[stage] for stage in range(len(items)))
    return Cut(ordered, tuple(crossings), _owned_in_turns(ordered))


def _owned_in_turns(graphs: Sequence[Graph]) -> dict[str, tuple[int, ...]]:
    """Parameters with the stages that read them, the owner first: large ones first, each goes to
    the stage that owns the least, so that all send and receive about as much.
    """
    shared = _shared(graphs)
    sizes = {  # what is not trained does not travel
        entry.target: entry.trainable * entry.value.spec.num_elements
        for own in graphs
        for entry in own.of_kind("parameter")
    }
    owned = [0] * len(graphs)
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(shared, key=lambda name: (-sizes[name], name)):
        owner = min(shared[name], key=lambda stage: (owned[stage], stage))
        owned[owner] += sizes[name]
        found[name] = (owner, *(stage for stage in shared[name] if stage != owner))
    return found


def like(graph: Graph, parts: Cut, decisions: Decisions) -> list[tuple[str, ...]]:
    """The items of `graph` in stages like those of the training program that `parts` cuts.

    An item that both have stays where it is; another one goes where its parameters and caches are,
    or to the stage that makes what it reads. A stage may end up with none.
    """
    found: list[tuple[str, ...]] = [()] * len(parts.graphs)
    for members in decisions.replicas:
        items = [decisions.stages[stage].items for stage in members]
        homes = {
            entry.target: number
            for number, stage in reversed(list(enumerate(members)))
            for entry in parts.graphs[stage].inputs
            if entry.kind in ("parameter", CACHE)
        }
        for stage, keys in zip(members, placed(graph, homes, items), strict=True):
            found[stage] = keys
    return found


def placed(
    graph: Graph, homes: Mapping[str, int], stages: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """All items of `graph` in stages: those of `stages` there, others where their parameters and
    caches have their `homes`, and none before what it reads.
    """
    known = {key: stage for stage, keys in enumerate(stages) for key in keys}
    lying = (i for i in graph.inputs if i.kind in ("parameter", CACHE))
    home_of = {i.value.name: homes.get(i.target, 0) for i in lying}
    made: dict[str, int] = {}
    found: list[list[str]] = [[] for _ in stages]
    for item in _Items(graph).owned:
        key = item_key(item)
        before = [made[name] for name in operands(item) if name in made]
        own = [home_of[name] for name in operands(item) if name in home_of]
        stage = max([known[key] if key in known else max(own, default=0), *before])
        made.update((name, stage) for name in results(item))
        found[stage].append(key)
    return [tuple(keys) for keys in found]


class StageDecisions:
    """The decisions about each stage of a plan, as those of a plan with no other.

    A parameter of several stages is stored as it was decided in the first of them; the others hold
    what they compute with. An operator that several stages compute is split as decided where all
    meshes have the same of the axes, and not at all elsewhere.
    """

    def __init__(self, decisions: Decisions, parts: Cut) -> None:
        self.decisions, self.parts = decisions, parts
        self._common = _common_axes(decisions)
        self._by_axes: dict[frozenset[str], _Named] = {}

    def of(self, index: int) -> Decisions:
        """Those about stage `index`."""
        graph, stage = self.parts.graphs[index], self.decisions.stages[index]
        named, common = self._named(stage.mesh), self._common & set(stage.mesh.names)
        items = set(stage.items)
        nodes, calls = [], dict[str, None]()
        for flat in graph.flat():
            calls[flat.prefix] = None
            node = named.nodes.get(flat.key)
            own = (flat.prefix or flat.node.key) in items
            if node and (own or common.issuperset(a for _, axes in node.factors for a in axes)):
                nodes.append(node)
        return replace(
            self.decisions,
            stages=one_stage(stage.mesh),
            num_microbatches=self.decisions.num_microbatches // stage.at_once,
            schedule="one_stage",
            actions=(),
            nodes=tuple(nodes),
            parameters=tuple(self._parameters(index, named)),
            activations=tuple(named.activations[c] for c in calls if c in named.activations),
        )

    def _parameters(self, index: int, named: "_Named") -> Iterator[ParameterDecision]:
        """Of all parameters that a stage reads; only one that it owns is stored as decided."""
        for entry in self.parts.graphs[index].of_kind("parameter"):
            found = named.parameters.get(entry.target)
            if found is not None:
                owner = self.parts.shared.get(entry.target, (index,))[0]
                yield found if owner == index else ParameterDecision(entry.target)

    def _named(self, mesh: Mesh) -> "_Named":
        """By name; a replica without an axis has whole what others split along it."""
        replicas = len(self.decisions.replicas) > 1
        axes = frozenset(mesh.names) if replicas else frozenset[str]()
        if axes not in self._by_axes:
            decisions = _with_axes(self.decisions, axes) if replicas else self.decisions
            self._by_axes[axes] = _Named(
                {node.key: node for node in decisions.nodes},
                {parameter.name: parameter for parameter in decisions.parameters},
                {activation.prefix: activation for activation in decisions.activations},
            )
        return self._by_axes[axes]


@dataclass(frozen=True, slots=True)
class _Named:
    """Decisions by operator, parameter and call."""

    nodes: Mapping[str, NodeDecision]
    parameters: Mapping[str, ParameterDecision]
    activations: Mapping[str, ActivationDecision]


def _with_axes(decisions: Decisions, names: Collection[str]) -> Decisions:
    """What is split along these axes: a replica without an axis has whole what others split."""

    def kept(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in names)

    def stored(storage: Storage) -> Storage:
        return replace(storage, axes=kept(storage.axes))

    return replace(
        decisions,
        nodes=tuple(
            replace(n, factors=tuple((f, own) for f, axes in n.factors if (own := kept(axes))))
            for n in decisions.nodes
        ),
        parameters=tuple(
            replace(
                p,
                weight=stored(p.weight),
                gradient=stored(p.gradient),
                optimizer=stored(p.optimizer),
            )
            for p in decisions.parameters
        ),
    )


def _common_axes(decisions: Decisions) -> set[str]:
    """Axes that have one size in all meshes that have them."""
    sizes: dict[str, set[int]] = {}
    for stage in decisions.stages:
        for axis in stage.mesh.axes:
            sizes.setdefault(axis.name, set()).add(axis.size)
    return {name for name, found in sizes.items() if len(found) == 1}


class _Items:
    """The items of main, and which of them every stage computes for itself."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        written = {name for name, _ in graph.updates}
        random = {f.name for f in graph.functions if any(map(_is_random, f.body))}
        moving = {
            i.value.name
            for i in graph.inputs
            if i.kind in ("parameter", ARRIVING) or (i.kind == "buffer" and i.target in written)
        }
        self.owned: list[Item] = []
        for item in graph.main.body:
            draws = item.function in random if isinstance(item, Call) else _is_random(item)
            if draws or not moving.isdisjoint(operands(item)):
                self.owned.append(item)
                moving.update(results(item))
        self.moving = moving

    @cached_property
    def keys(self) -> dict[str, Item]:
        return {item_key(item): item for item in self.owned}


def _is_random(item: Item) -> bool:
    if isinstance(item, Call):
        return False
    dropout = item.op == "scaled_dot_product_attention" and item.arg(4, "dropout_p", 0.0)
    return bool(op_of(item).random or dropout)


def operands(item: Item) -> tuple[str, ...]:
    """The values that an item reads."""
    return item.args if isinstance(item, Call) else item.refs


def results(item: Item) -> tuple[str, ...]:
    """The values that an item makes."""
    return tuple(v.name for v in item.results)


def _stage_of(items: _Items, stages: Sequence[Sequence[str]], empty: bool) -> dict[str, int]:
    """The stage of every item that stages have."""
    found: dict[str, int] = {}
    for stage, keys in enumerate(stages):
        if not keys and not empty:
            raise LayoutError(
                f"stage {stage} has no items; give it some, or leave it out: there are"
                f" {len(items.keys)} items for {len(stages)} stages"
            )
        for key in keys:
            if key not in items.keys:
                raise LayoutError(f"stage {stage}: {_unknown(items, key)}")
            if key in found:
                raise LayoutError(
                    f"{key} is in stage {found[key]} and in stage {stage}; leave it in one"
                )
            found[key] = stage
    missing = [key for key in items.keys if key not in found]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise LayoutError(f"{missing[0]}{others} is in no stage; add it to one")
    return found


def _unknown(items: _Items, key: str) -> str:
    graph = items.graph
    calls = [item.prefix for item in graph.main.body if isinstance(item, Call)]
    block = next((p for p in calls if key.startswith((f"{p}.", f"{p}:"))), None)
    if block is not None:
        return f"{key} is inside of the block {block}, which no stage boundary cuts; name {block}"
    if any(item_key(item) == key for item in graph.main.body):
        return f"{key} depends on no parameter: every stage that reads it computes it; leave it out"
    return f"the model has no item {key!r}{nearest(key, items.keys)}"


class _Stages:
    """Makes the graphs of stages; `stage_of` are those of items that stages have."""

    def __init__(self, items: _Items, stage_of: Mapping[str, int], count: int) -> None:
        self.graph, self.items, self.count = items.graph, items, count
        self.stage_of = stage_of
        self.specs = items.graph.main.specs()
        self.own: list[list[Item]] = [[] for _ in range(count)]
        self.made: dict[str, int] = {}
        for item in items.owned:
            stage = stage_of[item_key(item)]
            self.own[stage].append(item)
            self.made.update((name, stage) for name in results(item))
        # What no stage makes is computed or read there; without a loss, in the last stage.
        self.loss_stage = self.made.get(items.graph.loss or "", count - 1)
        self.unread: list[set[str]] = [set() for _ in range(count)]

    def cut(self) -> Cut:
        bodies = [self.body(stage) for stage in range(self.count)]
        targets: dict[str, list[int]] = {}
        for stage, body in enumerate(bodies):
            for name in dict.fromkeys(n for item in body for n in operands(item)):
                source = self.made.get(name, stage)
                if source > stage:
                    raise LayoutError(
                        f"{name} is made in stage {source} and read in stage {stage}, which comes"
                        " before; number stages so that values go to later ones only"
                    )
                if source < stage:
                    targets.setdefault(name, []).append(stage)
        self.check_buffers(bodies)
        self.unread = self.nobody_reads(bodies)
        crossings = tuple(
            Crossing(Value(name, self.specs[name]), self.made[name], tuple(readers))
            for name, readers in targets.items()
        )
        graphs = tuple(self.stage_graph(s, body, crossings) for s, body in enumerate(bodies))
        return Cut(graphs, crossings, _shared(graphs))

    def nobody_reads(self, bodies: Sequence[Sequence[Item]]) -> list[set[str]]:
        """By stage, the parameters and buffers that no item reads: those that are written go where
        they are made, the others to the items of the module that has them, since another program
        of the plan may read them there; of as near ones, to the first stage.
        """
        read = {name for body in bodies for item in body for name in operands(item)}
        written = {
            target: self.made.get(value, self.loss_stage) for target, value in self.graph.updates
        }
        found: list[set[str]] = [set() for _ in bodies]
        for entry in self.graph.inputs:
            if entry.kind in ("parameter", "buffer") and entry.value.name not in read:
                stage = written.get(entry.target)
                found[self.of_module(entry.target) if stage is None else stage].add(
                    entry.value.name
                )
        return found

    def of_module(self, target: str) -> int:
        """The first stage with an item of the innermost module of a parameter that has any."""
        words = target.split(".")
        around = (tuple(words[:length]) for length in range(len(words), -1, -1))
        return next((self.first_of[path] for path in around if path in self.first_of), 0)

    @cached_property
    def first_of(self) -> dict[tuple[str, ...], int]:
        """By module path, the first stage with an item of it or of a module inside."""
        found: dict[tuple[str, ...], int] = {}
        for key, stage in self.stage_of.items():
            words = key.split(":")[0].split(".")
            for length in range(len(words) + 1):
                path = tuple(words[:length])
                found[path] = min(stage, found.get(path, stage))
        return found

    def check_buffers(self, bodies: Sequence[Sequence[Item]]) -> None:
        """What a step writes back is read where it is made: others would read what it was."""
        named = {i.target: i.value.name for i in self.graph.of_kind("buffer")}
        for target, made in self.graph.updates:
            writer, name = self.made.get(made, self.loss_stage), named.get(target)
            for stage, body in enumerate(bodies):
                if stage != writer and any(name in operands(item) for item in body):
                    raise CutError(
                        f"{target} is written in stage {writer} and read in stage {stage}; put all"
                        " that reads it into one stage"
                    )

    def ends(self, stage: int) -> tuple[str, ...]:
        """The values that a stage hands to the user, the loss among them."""
        graph = self.graph
        named = (*graph.outputs, *graph.updates, *((("loss", graph.loss),) if graph.loss else ()))
        return tuple(name for _, name in named if self.made.get(name, self.loss_stage) == stage)

    def body(self, stage: int) -> tuple[Item, ...]:
        """A stage's items, and all that it computes for itself, in execution order."""
        own = {id(item) for item in self.own[stage]}
        wanted = set(self.ends(stage))
        chosen: list[Item] = []
        for item in reversed(self.graph.main.body):
            free = wanted.intersection(results(item)) and not self.made.keys() & set(results(item))
            if id(item) in own or free:
                chosen.append(item)
                wanted.update(operands(item))
        return tuple(reversed(chosen))

    def stage_graph(self, stage: int, body: Sequence[Item], crossings: Iterable[Crossing]) -> Graph:
        graph, ends = self.graph, set(self.ends(stage))
        arriving = [c.value for c in crossings if stage in c.targets]
        leaving = tuple(c.value.name for c in crossings if c.source == stage)
        read = {name for item in body for name in operands(item)} | ends | self.unread[stage]
        # Entries of the batch stay known to all stages: some read them, others do not.
        inputs = [i for i in graph.inputs if i.kind == "batch" or i.value.name in read]
        targets = {i.target for i in graph.inputs}
        for value in arriving:
            target = value.name
            while target in targets:
                target += "_"
            inputs.append(Input(value, ARRIVING, target))
        prefixes = {item.prefix for item in body if isinstance(item, Call)}
        called = {item.function for item in body if isinstance(item, Call)}
        names = tuple(dict.fromkeys(n for n in graph.main.outputs if n in ends))
        return replace(
            graph,
            functions=tuple(f for f in graph.functions if f.name in called),
            main=Function(
                graph.main.name, tuple(i.value for i in inputs), tuple(body), (*names, *leaving)
            ),
            inputs=tuple(inputs),
            loss=graph.loss if graph.loss in ends else None,
            outputs=tuple(pair for pair in graph.outputs if pair[1] in ends),
            updates=tuple(pair for pair in graph.updates if pair[1] in ends),
            recompute=tuple(p for p in graph.recompute if p in prefixes),
            leaving=leaving,
        )


def _shared(graphs: Sequence[Graph]) -> dict[str, tuple[int, ...]]:
    readers: dict[str, list[int]] = {}
    for stage, graph in enumerate(graphs):
        for entry in graph.of_kind("parameter"):
            readers.setdefault(entry.target, []).append(stage)
    return {name: tuple(stages) for name, stages in readers.items() if len(stages) > 1}
