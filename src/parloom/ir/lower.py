"""`lower`: graph and decisions in, parallel computation graph out.

For every operator the decision gives the layouts its operands must have and its results come out
with; between producer and consumer `plan_moves` puts the movements. Cotangents are derived in the
same walk: a value that an operator lacks a sharded factor of has a partial gradient there, and the
movement in front of the operator carries the adjoint that makes it whole again. Parameters are the
exception: their gradients stay partial and are reduced by the step program.

Microbatches are a mesh axis in time, outermost on the batch. No movement may cross it, with two
exceptions: the loss, summed by the executor, and reductions of values that depend on the batch
alone (counts of valid tokens), which move to the prologue.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from parloom.errors import LayoutError, NotYetError
from parloom.ir.factors import Factored, cut_to, factorize, follow, site_of
from parloom.ir.graph import (
    Call,
    FlatNode,
    Function,
    Graph,
    Node,
    TensorSpec,
    Value,
    node_key,
    with_operands,
)
from parloom.ir.layout import Layout, Shard, check
from parloom.ir.mesh import Mesh, MeshAxis
from parloom.ir.moves import Step, plan_moves
from parloom.ir.ops import OpDef, Rule, op_of
from parloom.ir.ops.rule import HALO, LOCAL
from parloom.ir.pcg import (
    PCG,
    TIME,
    Compute,
    Item,
    Movement,
    PCall,
    PFunction,
    PParameter,
    PValue,
)
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision

Assignment = dict[str, tuple[str, ...]]
Homes = Mapping[str, Layout]


def lower(
    graph: Graph,
    decisions: Decisions,
    *,
    factored: Factored | None = None,
    homes: Homes | None = None,
) -> PCG:
    """Derive every layout and movement of `graph` under `decisions`.

    `homes` fixes the compute layouts of parameters by name (an evaluation program uses the training
    program's). Raises `LayoutError` for an illegal decision, naming the operator by module path.
    """
    return _Lowering(graph, decisions, factored or factorize(graph), homes or {}).run()


class _Lowering:
    """State of one lowering: decisions by key, parameter layouts, variants made so far."""

    def __init__(
        self, graph: Graph, decisions: Decisions, factored: Factored, homes: Homes
    ) -> None:
        self.graph, self.decisions, self.factored = graph, decisions, factored
        self.steps = decisions.num_microbatches
        axes = decisions.mesh.axes
        self.mesh = (
            Mesh((*axes, MeshAxis(TIME, (), self.steps))) if self.steps > 1 else (decisions.mesh)
        )
        self.by_key = {n.key: n for n in decisions.nodes}
        self.policies = {a.prefix: a.policy for a in decisions.activations}
        self.variants: dict[object, PFunction] = {}
        self.hoist = _Hoist()
        if len(decisions.stages) > 1:
            raise NotYetError("pipeline stages are not yet executable; use one stage")
        self.uses: dict[str, list[tuple[FlatNode, int]]] = {}
        for flat in graph.flat():
            for index, name in enumerate(flat.operands):
                self.uses.setdefault(name, []).append((flat, index))
        self.parameters = _parameters(self, homes)

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
                inputs.append(PValue(value.name, value.spec, self.input_layout(entry.kind, value)))
        body = _Body(self, self.graph.main, "", tuple(inputs), top=True)
        body.run()
        loss = None
        if self.graph.loss is not None:
            found = body.values[self.graph.loss]
            kept = tuple(p for p in found.layout.partial if p[1] == "sum")
            if self.steps > 1 and TIME not in found.layout.partial_axes:
                raise LayoutError("the loss does not sum over microbatches; use one microbatch")
            loss = body.move(found, Layout((), kept), ())
        updates = tuple((n, body.move(body.values[v], Layout(), ())) for n, v in self.graph.updates)
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
        main = PFunction("forward", "forward", tuple(inputs), tuple(body.items), ())
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
            tuple(self.hoist.items),
            tuple(self.hoist.values),
        )

    def input_layout(self, kind: str, value: Value) -> Layout:
        """Layout in which an input arrives: batch tensors as their first consumer wants them."""
        if kind != "batch":
            return Layout()
        wanted = self.first_use(value.name)
        return _time_outermost(wanted, value.spec, self.mesh) if self.steps > 1 else wanted

    def first_use(self, name: str) -> Layout:
        """The layout that the first operator reading main's value `name` asks for."""
        for flat, index in self.uses.get(name, ()):
            rule = self.factored.rule(flat.function, flat.node)
            assignment = self.assignment(flat.prefix, flat.node)
            return rule.operand_layout(index, assignment, self.decisions.mesh)
        return Layout()

    def decision(self, prefix: str, node: Node) -> NodeDecision:
        key = node_key(prefix, node)
        return self.by_key.get(key) or NodeDecision(key)

    def assignment(self, prefix: str, node: Node) -> Assignment:
        """Factor -> axes of a node, without the empty ones."""
        decision = self.decision(prefix, node)
        if decision.submesh:
            raise NotYetError(f"{decision.key}: operators on a submesh are not yet executable")
        return {f: axes for f, axes in decision.factors if axes}

    def variant_name(self, kind: str) -> str:
        """A name for the next variant of a block kind that no other function has."""
        taken = {f.name for f in self.variants.values()}
        if kind not in taken:
            return kind
        taken |= set(self.graph.by_name)
        return next(n for n in (f"{kind}_{i}" for i in count(2)) if n not in taken)

    def call(self, call: Call, inputs: tuple[PValue, ...]) -> PFunction:
        """The variant of the called block for these inputs and decisions."""
        function = self.graph.by_name[call.function]
        chosen = tuple(
            tuple(sorted(self.assignment(call.prefix, n).items()))
            for n in function.body
            if isinstance(n, Node)
        )
        types = tuple((v.layout, v.varying, v.differentiable) for v in inputs)
        key = (function.name, chosen, types)
        if key not in self.variants:
            name = self.variant_name(function.name)
            formal = tuple(
                replace(value, name=v.name)
                for value, v in zip(inputs, function.inputs, strict=True)
            )
            body = _Body(self, function, call.prefix, formal)
            body.run()
            outputs = tuple(body.values[n] for n in function.outputs)
            self.variants[key] = PFunction(name, function.name, formal, tuple(body.items), outputs)
        return self.variants[key]


class _Hoist:
    """Prologue under construction: items copied out of main, and (prologue value, value) pairs."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.values: list[tuple[PValue, PValue]] = []


class _Body:
    """Lowers one function body; `values` maps the graph's names to distributed values."""

    def __init__(
        self,
        owner: _Lowering,
        function: Function,
        prefix: str,
        inputs: tuple[PValue, ...],
        *,
        top: bool = False,
    ) -> None:
        self.owner, self.function, self.prefix, self.top = owner, function, prefix, top
        self.mesh = owner.mesh
        self.values = {v.name: v for v in inputs}
        self.names = set(function.specs())
        self.items: list[Item] = []
        self.at = prefix or "(top)"  # the operator being lowered, for messages
        self.moved: dict[tuple[str, Layout, tuple[str, ...]], PValue] = {}
        self.pure = {
            i.value.name for i in owner.graph.inputs if top and i.kind in ("batch", "constant")
        }

    def run(self) -> None:
        for item in self.function.body:
            if isinstance(item, Call):
                self.lower_call(item)
            else:
                rule = self.owner.factored.rule(self.function.name, item)
                assignment = self.owner.assignment(self.prefix, item)
                self.at = f"{node_key(self.prefix, item)} ({item.source})"
                self.lower_node(item, rule, assignment)

    def lower_call(self, call: Call) -> None:
        args = tuple(self.values[a] for a in call.args)
        variant = self.owner.call(call, args)
        results = tuple(
            replace(out, name=value.name)
            for out, value in zip(variant.outputs, call.results, strict=True)
        )
        policy = self.owner.policies.get(call.prefix, "keep")
        self.items.append(PCall(variant.name, call.prefix, args, results, policy))
        self.values.update((v.name, v) for v in results)

    def lower_node(self, node: Node, rule: Rule, assignment: Assignment) -> None:
        sources = tuple(self.values[name] for name in node.refs)
        assignment = self.add_time(node, rule, assignment, sources)
        rule.check(assignment, self.mesh, f"{node_key(self.prefix, node)} ({node.source})")
        op = op_of(node)
        kept = self.passing(op, sources)
        operands = []
        for index, value in enumerate(sources):
            layout = rule.operand_layout(index, assignment, self.mesh)
            layout = Layout(layout.shards, tuple(p for p in kept if self.unsummed(value, p[0])))
            operands.append(self.move(value, layout, rule.varying(index, assignment)))
        local = frozenset(f for f in assignment if rule.kind(f) == LOCAL)
        if local and op.expand is not None:
            self.expand(node, op.expand(site_of(node, self.specs(node)), local), operands)
            return
        if op.halo is not None and operands:
            site = site_of(node, self.specs(node))
            operands[0] = self.halo(operands[0], assignment, rule, op.halo(site))
        differentiable = op.differentiable and any(v.differentiable for v in sources)
        results = []
        for index, made in enumerate(node.results):
            layout = rule.result_layout(index, assignment, self.mesh)
            layout = Layout(layout.shards, (*layout.partial, *kept))
            check(layout, made.spec.shape, self.mesh, node.key)
            results.append(
                PValue(made.name, made.spec, layout, (), differentiable and made.spec.is_float)
            )
        renamed = with_operands(node, tuple(v.name for v in operands))
        self.items.append(
            Compute(renamed, rule, tuple(assignment.items()), tuple(operands), tuple(results))
        )
        self.values.update((v.name, v) for v in results)
        if all(v.name in self.pure for v in sources):
            self.pure.update(v.name for v in results)

    def passing(self, op: OpDef, sources: tuple[PValue, ...]) -> tuple[tuple[str, str], ...]:
        """Partial sums that this operator need not wait for: over time, and scalars over any axis.

        What depends on the batch alone (a count of tokens) is summed where it is read instead.
        """
        axes = {a for v in sources for a, reduction in v.layout.partial if reduction == "sum"}
        kept = []
        for axis in self.mesh.names:
            if axis not in axes or (axis != TIME and any(v.spec.shape for v in sources)):
                continue
            if op.passes_partial(tuple(self.unsummed(v, axis) for v in sources)):
                kept.append((axis, "sum"))
        return tuple(kept)

    def unsummed(self, value: PValue, axis: str) -> bool:
        """Whether a value is partial over `axis` and may stay so."""
        batch_only = not value.differentiable and value.name in self.pure
        return axis in value.layout.partial_axes and not batch_only

    def specs(self, node: Node) -> dict[str, TensorSpec]:
        return {name: self.values[name].spec for name in node.refs}

    def add_time(
        self, node: Node, rule: Rule, assignment: Assignment, sources: tuple[PValue, ...]
    ) -> Assignment:
        """Put the time axis where the operands carry it; it is never a choice."""
        if self.owner.steps == 1:
            return assignment
        lying = follow(rule, tuple(_only_time(v.layout) for v in sources), self.mesh)
        carried = any(v.layout.shard(TIME) for v in sources)
        if carried and not lying:
            raise LayoutError(
                f"{node_key(self.prefix, node)} ({node.source}): operator {node.op!r} mixes the"
                " samples of different microbatches; use one microbatch"
            )
        return assignment | {f: (TIME, *assignment.get(f, ())) for f in lying}

    def expand(self, node: Node, program: Function, operands: list[PValue]) -> None:
        """Lower a local program in place of `node`; inner operators take operands as they lie."""
        outer = self.values
        base = node.results[0].name
        self.values = {v.name: o for v, o in zip(program.inputs, operands, strict=True)}
        outputs = dict(zip(program.outputs, node.results, strict=False))
        for inner in program.body:
            assert isinstance(inner, Node)
            names = {v.name: self.fresh(f"{base}_{v.name}") for v in inner.results}
            names |= {o: v.name for o, v in outputs.items() if o in names}
            site = site_of(inner, {n: self.values[n].spec for n in inner.refs})
            layouts = tuple(
                v.layout.without(v.layout.partial_axes)
                for v in (self.values[n] for n in inner.refs)
            )
            rule = cut_to(op_of(inner).rule(site), layouts, self.mesh)
            assignment = follow(rule, layouts, self.mesh)
            assignment = {f: tuple(a for a in x if a != TIME) for f, x in assignment.items()}
            before = dict(self.values)
            result = replace(
                inner,
                results=tuple(replace(v, name=names[v.name]) for v in inner.results),
                source=node.source,
            )
            self.lower_node(result, rule, {f: a for f, a in assignment.items() if a})
            for old, new in names.items():
                before[old] = self.values[new]
            self.values = before
        made = {v.name: self.values[o] for o, v in outputs.items()}
        self.values = outer | made

    def fresh(self, name: str) -> str:
        """A value name that this function does not use yet."""
        result, count = name, 1
        while result in self.names:
            count += 1
            result = f"{name}_{count}"
        self.names.add(result)
        return result

    def halo(
        self, value: PValue, assignment: Assignment, rule: Rule,
        rows: Mapping[str, tuple[int, int, int]],
    ) -> PValue:  # fmt: skip
        """Exchange border rows for every sharded halo factor."""
        for factor, axes in assignment.items():
            if rule.kind(factor) != HALO:
                continue
            dim, below, above = rows[factor]
            if not below and not above:
                continue
            step = Step("halo_exchange", axes, value.layout, dim, halo=(below, above))
            value = self.emit(value, step, value.varying, ((dim, below, above), *value.halo))
        return value

    def move(self, value: PValue, layout: Layout, varying: tuple[str, ...]) -> PValue:
        """`value` in another layout and cotangent state; equal requests share one chain."""
        key = (value.name, layout, tuple(sorted(varying)))
        if key in self.moved:
            return self.moved[key]
        check(layout, value.spec.shape, self.mesh, value.name)
        if TIME in value.layout.partial_axes and TIME not in layout.partial_axes:
            value = self.hoisted(value, layout)
        steps = plan_moves(
            value.layout,
            layout,
            value.spec.shape,
            self.mesh,
            source_varying=(*value.varying, TIME),
            target_varying=(*varying, TIME),
            differentiable=value.differentiable,
        )
        result = value
        vary = set(value.varying)
        for step in steps:
            if TIME in step.axes and not step.row.startswith("partition"):
                raise LayoutError(
                    f"{self.at}: value {value.name!r} must cross microbatches ({step.row}); use one"
                    " microbatch"
                )
            if step.row == "reduce" and step.reduction != "sum" and value.differentiable:
                raise LayoutError(f"{value.name!r}: a {step.reduction} over shards has no gradient")
            vary = _varying_after(vary, step)
            result = self.emit(result, step, tuple(sorted(vary)))
        self.moved[key] = result
        return result

    def emit(
        self, value: PValue, step: Step, varying: tuple[str, ...],
        halo: tuple[tuple[int, int, int], ...] = (),
    ) -> PValue:  # fmt: skip
        base = value.name.split("__")[0]
        name = self.fresh(f"{base}__{step.row.removesuffix('_varying')}_{'_'.join(step.axes)}")
        result = PValue(name, value.spec, step.result, varying, value.differentiable, halo)
        self.items.append(Movement(step, value, result))
        if value.name in self.pure:
            self.pure.add(name)
        return result

    def hoisted(self, value: PValue, layout: Layout) -> PValue:
        """Replace a sum over microbatches of a batch-only value by the prologue's result."""
        if not self.top or value.differentiable or value.name not in self.pure:
            raise LayoutError(
                f"{self.at}: value {value.name!r} is reduced over microbatches and depends on"
                " parameters; use one microbatch"
            )
        kept = tuple(p for p in value.layout.partial if p[0] == TIME)
        items = _ancestors(self.items, value.name)
        steps = plan_moves(
            value.layout,
            Layout(layout.shards, kept),
            value.spec.shape,
            self.mesh,
            differentiable=False,
        )
        made = value
        for step in steps:
            made = self.emit(made, step, ())
            items.append(self.items.pop())
        hoist = self.owner.hoist
        hoist.items += [i for i in items if i not in hoist.items]
        result = PValue(self.fresh(f"{value.name}__all_microbatches"), value.spec, layout)
        hoist.values.append((made, result))
        return result


def _only_time(layout: Layout) -> Layout:
    return Layout(tuple(s for s in layout.shards if s.axis == TIME))


def _time_outermost(layout: Layout, spec: TensorSpec, mesh: Mesh) -> Layout:
    steps = mesh[TIME].size
    if not spec.shape or spec.shape[0] % steps:
        raise LayoutError(
            f"a batch tensor of shape {spec.shape} does not divide into {steps} microbatches"
        )
    size = spec.shape[0]
    inner = tuple(
        Shard(s.axis, s.dim, s.stride // steps) if s.dim == 0 else s for s in layout.shards
    )
    return Layout((Shard(TIME, 0, size // steps), *inner))


def _varying_after(varying: set[str], step: Step) -> set[str]:
    """Cotangent state of replicated axes after a step."""
    axes = set(step.axes)
    if step.row in ("replicate", "combine_varying", "reduce_varying"):
        return varying | axes
    if step.row in ("elect", "partition_varying"):
        return varying - axes
    return varying


def _ancestors(items: list[Item], name: str) -> list[Item]:
    """The items that `name` depends on, in order."""
    needed, found = {name}, []
    for item in reversed(items):
        results = (item.result,) if isinstance(item, Movement) else item.results
        if any(v.name in needed for v in results):
            found.append(item)
            if isinstance(item, Movement):
                needed.add(item.operand.name)
            elif isinstance(item, Compute):
                needed.update(v.name for v in item.operands)
            else:
                needed.update(v.name for v in item.args)
    return found[::-1]


def _parameters(owner: _Lowering, homes: Homes) -> dict[str, PParameter]:
    """Compute layout and reduction axes of every parameter, from all its uses.

    The home layout is that of the use that shards the parameter most; other uses move from it.
    """
    graph, mesh = owner.graph, owner.decisions.mesh
    decisions = {p.name: p for p in owner.decisions.parameters}
    result: dict[str, PParameter] = {}
    for entry in graph.of_kind("parameter"):
        home = homes.get(entry.target)
        wanted: list[tuple[Layout, tuple[str, ...]]] = []
        for flat, index in owner.uses.get(entry.value.name, ()):
            rule = owner.factored.rule(flat.function, flat.node)
            assignment = owner.assignment(flat.prefix, flat.node)
            layout = rule.operand_layout(index, assignment, mesh)
            wanted.append((layout, rule.varying(index, assignment)))
        if home is None:
            home = max(
                (layout for layout, _ in wanted),
                key=lambda layout: mesh.size(layout.axes),
                default=Layout(),
            )
        reduce = {a for layout, varying in wanted for a in (*varying, *layout.axes)}
        axes = tuple(a for a in mesh.names if a in reduce and a not in home.axes)
        decision = decisions.get(entry.target, ParameterDecision(entry.target))
        result[entry.value.name] = PParameter(entry, home, axes, decision)
    return result
