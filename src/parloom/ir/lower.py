"""`lower`: graph and decisions in, parallel computation graph out.

For every operator the decision gives the layouts its operands must have and its results come out
with; between producer and consumer `plan_moves` puts the movements. Cotangents are derived in the
same walk: a value that an operator lacks a sharded factor of has a partial gradient there, and the
movement in front of the operator carries the adjoint that makes it whole again. Parameters are the
exception: their gradients stay partial and are reduced by the step program.

Microbatches are a mesh axis in time, outermost on the samples. No movement may cross it, with two
exceptions: the loss, summed by the executor, and reductions of values that depend on the batch
alone (counts of valid tokens), which move to the prologue.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from parloom.errors import CutError, LayoutError
from parloom.ir.adjacent import Adjacent, adjacent_parameters
from parloom.ir.factors import Factored, factorize, follow
from parloom.ir.graph import (
    CACHE,
    Boundary,
    Call,
    FlatNode,
    Function,
    Graph,
    Node,
    Value,
    node_key,
)
from parloom.ir.layout import Layout, Shard, spread
from parloom.ir.lower_body import WAY_ON, Assignment, Body, Hoist
from parloom.ir.mesh import MeshAxis
from parloom.ir.microbatches import divisors, expanded, nearest_counts
from parloom.ir.ops import op_of
from parloom.ir.pcg import (
    PCG,
    TIME,
    Item,
    Movement,
    PCall,
    PFunction,
    PParameter,
    PValue,
    Remake,
    operands_of,
    results_of,
)
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision
from parloom.ir.remake import Maker, remake
from parloom.ir.samples import sample_dims
from parloom.ir.stages import ARRIVING

Homes = Mapping[str, Layout]
KEPT = ("buffer", CACHE)  # what a pass leaves to the next


def lower(
    graph: Graph,
    decisions: Decisions,
    *,
    factored: Factored | None = None,
    homes: Homes | None = None,
) -> PCG:
    """Derive every layout and movement of `graph` under `decisions`.

    `homes` fixes the compute layouts of parameters, and those of caches, by name (an evaluation
    program uses the training program's, and lays none beside another). Raises `LayoutError` for an
    illegal decision, naming the operator by module path.
    """
    return _Lowering(graph, decisions, factored or factorize(graph), homes).run()


class _Lowering:
    """State of one lowering: decisions by key, parameter layouts, variants made so far."""

    def __init__(
        self,
        graph: Graph,
        decisions: Decisions,
        factored: Factored,
        homes: Homes | None,
    ) -> None:
        self.graph, self.decisions, self.factored = graph, decisions, factored
        self.boundary = graph.boundary or Boundary()
        count, axes = decisions.num_microbatches, decisions.mesh.axes
        # A program of one microbatch has nothing to cut: only its inputs and draws lie in time.
        self.steps = 1 if decisions.accumulates else count
        whole = decisions.mesh
        timed = replace(whole, axes=(*axes, MeshAxis(TIME, (), count)))
        self.mesh = timed if count > 1 else whole
        self.by_key = {n.key: n for n in decisions.nodes}
        self.assigned: dict[tuple[str, str], Assignment] = {}
        self.policies = {a.prefix: a.policy for a in decisions.activations if not a.lists}
        self.lists = {a.prefix: (a.values, a.moves) for a in decisions.activations if a.lists}
        self.bodies: dict[object, tuple[PFunction, Mapping[str, Maker]]] = {}
        self.remade: dict[object, Remake | None] = {}
        self.variants: dict[object, PFunction] = {}
        self.hoist = Hoist()
        self.samples = sample_dims(self.factored) if self.steps > 1 else {}
        functions = (graph.main, *graph.functions)
        self.names = {name for function in functions for name in function.specs()}
        self.homes = homes or {}
        self.parameters = _parameters(self, self.homes)
        self.beside = Adjacent()
        if homes is None:
            self.beside = adjacent_parameters(graph, self.parameters, self.read_in_place)
        self.layouts = {
            i.value.name: self.input_layout(i.kind, i.target, i.value)
            for i in graph.inputs
            if i.kind != "parameter"
        }
        self.kept = {i.target: self.layouts[i.value.name] for i in graph.inputs if i.kind in KEPT}
        shards = {name: layout.shard(TIME) for name, layout in self.layouts.items()}
        given = {name: shard for name, shard in shards.items() if shard is not None}
        self.cuts = expanded(self.factored, given, self.steps, self.divides) if given else {}

    def run(self) -> PCG:
        inputs = []
        for entry in self.graph.inputs:
            value = entry.value
            if entry.kind == "parameter":
                parameter = self.parameters[value.name]
                inputs.append(
                    PValue(
                        value.name, value.spec, parameter.layout, parameter.reduce, entry.trainable
                    )
                )
            else:
                layout = self.layouts[value.name]
                # In the hand-made plans what another stage made is an entry of the batch.
                flows = entry.trainable or value.name in self.boundary.flowing
                inputs.append(PValue(value.name, value.spec, layout, (), flows))
        body = Body(self, self.graph.main, "", tuple(inputs), top=True)
        body.run()
        loss = None
        if self.graph.loss is not None:
            found = body.values[self.graph.loss]
            kept = tuple(p for p in found.layout.partial if p[1] == "sum")
            if self.steps > 1 and TIME not in found.layout.partial_axes:
                raise LayoutError(f"the loss {self.graph.loss!r} is no sum over samples; {WAY_ON}")
            loss = body.move(found, Layout((), kept), ())
        updates = tuple(
            (n, body.move(body.values[v], self.kept[n], ())) for n, v in self.graph.updates
        )
        outputs = tuple(
            (
                n,
                body.move(
                    body.values[v],
                    body.values[v].layout.without(body.values[v].layout.partial_axes),
                    (),
                ),
            )
            for n, v in self.graph.outputs
        )
        made = (body.values[name] for name in self.graph.leaving)
        leaving = tuple(body.move(value, self.sent(value), ()) for value in made)
        ends = {v.name for _, v in (*outputs, *updates)} | ({loss.name} if loss else set())
        ends |= {v.name for v in leaving}
        items = _without(self.hoist.items, body.items, ends)
        main = PFunction("forward", "forward", tuple(inputs), items, ())
        self.check_caches(main)
        return PCG(
            self.graph,
            self.decisions,
            self.mesh,
            tuple(self.variants.values()),
            main,
            tuple(self.parameters.values()),
            loss,
            outputs,
            updates,
            leaving,
            tuple(self.hoist.items),
            tuple(self.hoist.values),
            self.beside.groups,
        )

    def check_caches(self, main: PFunction) -> None:
        """Raise `LayoutError` where a cache that is written is moved first: its copy would be."""
        updated = {name for name, _ in self.graph.updates}
        entries = {e.value.name: e.target for e in self.graph.of_kind(CACHE) if e.target in updated}
        by_name = {function.name: function for function in self.variants.values()}
        bodies = [(main, entries)]
        for item in main.body:
            if isinstance(item, PCall):
                formal = zip(by_name[item.function].inputs, item.args, strict=True)
                named = {f.name: entries[a.name] for f, a in formal if a.name in entries}
                bodies.append((by_name[item.function], named))
        for function, named in bodies:
            for item in function.body:
                if isinstance(item, Movement) and item.operand.name in named:
                    raise LayoutError(
                        f"{named[item.operand.name]}: a cache is written where it lies, and other"
                        " programs of the plan, or microbatches, have it in another layout than"
                        " what writes to it"
                    )

    def sent(self, value: PValue) -> Layout:
        """The layout in which a value leaves for another stage: whole sums, no part twice.

        Raises `CutError` where its readers, who know the whole graph, take it for another sum
        over microbatches.
        """
        summed = tuple(a for a in value.layout.partial_axes if a != TIME)
        layout = value.layout.without(summed)
        whole = self.boundary.in_time[value.name]
        time, own = whole.shard(TIME), layout.shard(TIME)
        if layout.partial != whole.partial or own not in (None, time):
            # A stage that is lowered alone knows less of what its values depend on.
            raise CutError(
                f"{value.name!r} lies otherwise over microbatches where a stage ends behind it than"
                " in the whole model; put what makes it and what reads it into one stage"
            )
        if time is not None and layout.shard(TIME) is None:
            # Readers take microbatches of it, which are outermost in their dim.
            layout = layout.without(s.axis for s in layout.of_dim(time.dim)).place(time)
        return spread(layout, value.spec.shape, self.mesh)

    def received(self, value: Value) -> Layout:
        """The layout in which a value arrives: as its first reader wants it, no part twice."""
        time = self.boundary.in_time[value.name]
        uses = self.graph.uses.get(value.name, ())
        layout = time
        if uses:
            shard = time.shard(TIME)
            flat, index = uses[0]
            found = self.wanted(flat, index) if shard is None else self.timed(flat, index, shard)
            layout = Layout(found.shards, time.partial)
        return spread(layout, value.spec.shape, self.mesh)

    def input_layout(self, kind: str, target: str, value: Value) -> Layout:
        """Layout in which an input arrives: batch tensors as their first consumer wants them, and
        caches as what writes to them does.
        """
        if kind == ARRIVING:
            return self.received(value)
        if kind == CACHE and target in self.homes:
            return self.homes[target]
        uses = self.graph.uses.get(value.name, ()) if kind in ("batch", CACHE) else ()
        if not uses:
            return Layout()
        flat, index = uses[0]
        if (dim := self.samples.get(target)) is None:
            return self.wanted(flat, index)
        rule = self.factored.rule(flat.function, flat.node)
        chosen = self.chosen(flat.prefix, flat.node)
        size = value.spec.shape[dim]
        axes = chosen.get(next(iter(rule.operands[index][dim]), ""), ())  # on the outermost factor
        if size % (self.steps * self.mesh.size(axes)):
            raise _indivisible(target, size, dim, self.steps, self.mesh.size(axes))
        return self.timed(flat, index, Shard(TIME, dim, size // self.steps))

    def timed(self, flat: FlatNode, index: int, shard: Shard) -> Layout:
        """The layout in which an operator reads its operand `index`, of which it gets microbatches
        by `shard`; that alone where the operator cannot be cut so.
        """
        rule = self.factored.rule(flat.function, flat.node)
        chosen = self.chosen(flat.prefix, flat.node)
        lying = tuple(Layout((shard,) if i == index else ()) for i in range(len(rule.operands)))
        timed = {f: (TIME, *chosen.get(f, ())) for f in follow(rule, lying, self.mesh)}
        layout = rule.operand_layout(index, chosen | timed, self.mesh)
        layout = layout.without(layout.partial_axes)
        return layout if layout.shard(TIME) == shard else Layout((shard,))

    def wanted(self, flat: FlatNode, index: int) -> Layout:
        """The layout in which an operator reads its operand `index`, of sums the whole."""
        rule = self.factored.rule(flat.function, flat.node)
        assignment = self.chosen(flat.prefix, flat.node)
        layout = rule.operand_layout(index, assignment, self.decisions.mesh)
        return layout.without(layout.partial_axes)

    def read_in_place(self, flat: FlatNode, index: int) -> Layout | None:
        """The layout in which an operator reads its operand `index`; None where some ranks read
        zeros, so that it counts once.
        """
        rule = self.factored.rule(flat.function, flat.node)
        chosen = self.chosen(flat.prefix, flat.node)
        masked = rule.counts_once(index, chosen) or rule.summed_axes(chosen)
        return None if masked else self.wanted(flat, index)

    def adjacent(self, prefix: str, node: Node) -> tuple[int, ...]:
        """The arguments of an operator that lie one after the other."""
        return self.beside.of(prefix, node)

    def decision(self, prefix: str, node: Node) -> NodeDecision:
        key = node_key(prefix, node)
        return self.by_key.get(key) or NodeDecision(key)

    def chosen(self, prefix: str, node: Node) -> Assignment:
        """Factor -> axes over ranks of a node, without the empty ones."""
        place = prefix, node.key
        if place not in self.assigned:
            decision = self.decision(prefix, node)
            self.assigned[place] = {f: axes for f, axes in decision.factors if axes}
        return self.assigned[place]

    def assignment(self, prefix: str, node: Node) -> Assignment:
        """`chosen`, with the axis in time where the node makes each microbatch its own part."""
        chosen, factor = self.chosen(prefix, node), self.cuts.get((prefix, node.key))
        return chosen if factor is None else chosen | {factor: (TIME, *chosen.get(factor, ()))}

    def divides(self, flat: FlatNode, factor: str) -> bool:
        """Whether a factor divides into microbatches beside the axes that are on it."""
        axes = self.chosen(flat.prefix, flat.node).get(factor, ())
        size = self.factored.rule(flat.function, flat.node).size(factor)
        return size % (self.steps * self.decisions.mesh.size(axes)) == 0

    def variant_name(self, kind: str) -> str:
        """A name for the next variant of a block kind that no other function has."""
        made = self.variants.values()
        taken = self.names | {f.name for f in made} | {f.remake.name for f in made if f.remake}
        if kind not in taken:
            return kind
        taken |= set(self.graph.by_name)
        return next(n for n in (f"{kind}_{i}" for i in count(2)) if n not in taken)

    def call(self, call: Call, inputs: tuple[PValue, ...]) -> PFunction:
        """The variant of the called block for these inputs and decisions."""
        function = self.graph.by_name[call.function]
        nodes = [item for item in function.body if isinstance(item, Node)]
        chosen = tuple(
            (tuple(sorted(self.assignment(call.prefix, n).items())), self.adjacent(call.prefix, n))
            for n in nodes
        )
        types = tuple((v.layout, v.varying, v.differentiable) for v in inputs)
        key = (function.name, chosen, types)
        if key not in self.bodies:
            self.bodies[key] = self.body(function, call.prefix, inputs)
        lowered, makers = self.bodies[key]
        lists = self.lists.get(call.prefix)
        if (key, lists) not in self.remade:
            self.remade[key, lists] = remake(lowered, makers, *lists) if lists else None
        remade = self.remade[key, lists]
        variant = key, remade and remade.dropped
        if variant not in self.variants:
            name = self.variant_name(function.name)
            if remade is not None:
                remade = replace(remade, name=self.variant_name(f"{function.name}_again"))
            self.variants[variant] = replace(lowered, name=name, remake=remade)
        return self.variants[variant]

    def body(
        self, function: Function, prefix: str, inputs: tuple[PValue, ...]
    ) -> tuple[PFunction, Mapping[str, Maker]]:
        """A lowered block function, and the makers of its values."""
        formal = tuple(
            replace(value, name=v.name) for value, v in zip(inputs, function.inputs, strict=True)
        )
        body = Body(self, function, prefix, formal)
        body.run()
        outputs = tuple(body.values[n] for n in function.outputs)
        items = tuple(body.items)
        return PFunction(function.name, function.name, formal, items, outputs), body.makers


def _without(hoisted: list[Item], items: list[Item], ends: set[str]) -> tuple[Item, ...]:
    """The items of main but those that only the prologue needed."""
    kept: list[Item] = []
    read = set(ends)
    for item in reversed(items):
        if item not in hoisted or any(v.name in read for v in results_of(item)):
            kept.append(item)
            read.update(v.name for v in operands_of(item))
    return tuple(reversed(kept))


def _indivisible(target: str, size: int, dim: int, steps: int, ranks: int) -> LayoutError:
    """Microbatches that do not divide the samples of an input; the nearest that do."""
    over = f" x {ranks} data-parallel ranks" if ranks > 1 else ""
    each = size // ranks if size % ranks == 0 else 1
    return LayoutError(
        f"the {size} samples of input {target!r} (dim {dim}) do not divide into {steps}"
        f" microbatches{over}; {nearest_counts(steps, divisors(each))}"
        f"{f' ({each} samples per rank)' if ranks > 1 else ''}"
    )


def _parameters(owner: _Lowering, homes: Homes) -> dict[str, PParameter]:
    """Compute layout and reduction axes of every parameter, from all its uses.

    The home layout is that of the use that shards the parameter most; other uses move from it.
    """
    graph, mesh = owner.graph, owner.decisions.mesh
    decisions = {p.name: p for p in owner.decisions.parameters}
    demanded = _demanded(owner)
    result: dict[str, PParameter] = {}
    for entry in graph.of_kind("parameter"):
        name = entry.value.name
        home = homes.get(entry.target)
        if home is None:
            wanted = (owner.wanted(flat, index) for flat, index in graph.uses.get(name, ()))
            home = max(wanted, key=lambda layout: mesh.size(layout.axes), default=Layout())
        axes = demanded.get(name, set()) - set(home.axes)
        reduce = tuple(a for a in mesh.names if a in axes)
        decision = decisions.get(entry.target, ParameterDecision(entry.target))
        result[name] = PParameter(entry, home, reduce, decision)
    return result


def _demanded(owner: _Lowering) -> dict[str, set[str]]:
    """Axes over which their readers leave the gradients of parameters partial, by value.

    What is made of parameters alone (a cast, a table looked up by position) passes its own gradient
    on as it arrives, on axes where every rank makes the same: it is summed once a step and in
    buckets with all others, not where it is made.
    """
    flats = tuple(owner.graph.flat())
    derived = _derived(owner.graph, flats)
    demanded: dict[str, set[str]] = {name: set() for name in derived}
    for flat in reversed(flats):
        if not derived.intersection(flat.operands):
            continue
        assignment = owner.chosen(flat.prefix, flat.node)
        rule = owner.factored.rule(flat.function, flat.node)
        used = {a for axes in assignment.values() for a in axes}
        passed = {a for r in flat.results for a in demanded.get(r, ())} - used
        for index, name in enumerate(flat.operands):
            if name in derived:
                layout = owner.wanted(flat, index)
                demanded[name].update(rule.varying(index, assignment), layout.axes, passed)
    return demanded


def _derived(graph: Graph, flats: Iterable[FlatNode]) -> set[str]:
    """Parameters, and what differentiable operators make of them without looking at the batch, or
    at what earlier stages made of it.
    """
    derived = {i.value.name for i in graph.of_kind("parameter")}
    fixed = {i.value.name for i in graph.inputs if i.kind not in ("batch", ARRIVING)}
    for flat in flats:
        if fixed.issuperset(flat.operands):
            fixed.update(flat.results)
            if derived.intersection(flat.operands) and op_of(flat.node).differentiable:
                derived.update(flat.results)
    return derived
