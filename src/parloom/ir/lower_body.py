"""Lowering of one function body: operators, their movements, and what is hoisted out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from parloom.errors import LayoutError
from parloom.ir.adjacent import operands_at
from parloom.ir.factors import Factored, cut_to, follow, site_of
from parloom.ir.graph import (
    Arg,
    Call,
    Dtype,
    Function,
    Graph,
    Node,
    Ref,
    TensorSpec,
    Value,
    node_key,
    with_operands,
)
from parloom.ir.layout import Layout, check
from parloom.ir.mesh import Mesh
from parloom.ir.moves import Step, plan_moves
from parloom.ir.ops import OpDef, Rule, op_of
from parloom.ir.ops.rule import HALO, LOCAL
from parloom.ir.pcg import (
    TIME,
    Compute,
    Item,
    Movement,
    PCall,
    PFunction,
    PValue,
    operands_of,
    results_of,
)
from parloom.ir.remake import Maker

Assignment = dict[str, tuple[str, ...]]
WAY_ON = (
    "use one microbatch, or --batch-semantics microbatch, where each microbatch is computed by"
    " itself, as gradient accumulation does"
)


class Owner(Protocol):
    """What a body asks of the lowering that it belongs to."""

    graph: Graph
    factored: Factored
    mesh: Mesh
    steps: int
    policies: dict[str, str]
    hoist: "Hoist"

    def assignment(self, prefix: str, node: Node) -> Assignment: ...

    def adjacent(self, prefix: str, node: Node) -> tuple[int, ...]: ...

    def call(self, call: Call, inputs: tuple[PValue, ...]) -> PFunction: ...


class Hoist:
    """Prologue under construction: items copied out of main, and (prologue value, value) pairs."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.values: list[tuple[PValue, PValue]] = []


class Body:
    """Lowers one function body; `values` maps the graph's names to distributed values."""

    def __init__(
        self,
        owner: Owner,
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
        self.moved: dict[tuple[str, Layout, tuple[str, ...] | None], PValue] = {}
        self.reached: dict[tuple[str, Layout], PValue] = {}
        self.makers = {v.name: Maker(v.name) for v in inputs}
        self.expanded = ""  # the operator whose local program is being lowered
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
        self.makers.update((v.name, Maker(v.name)) for v in results)

    def lower_node(self, node: Node, rule: Rule, assignment: Assignment) -> None:
        node = self.in_shares(node)
        sources = tuple(self.values[name] for name in node.refs)
        assignment = self.add_time(node, rule, assignment, sources)
        rule.check(assignment, self.mesh, f"{node_key(self.prefix, node)} ({node.source})")
        op = op_of(node)
        kept = self.passing(op, node, sources)
        varying = _passing_varying(op, sources, assignment)
        operands = []
        for index, value in enumerate(sources):
            layout = rule.operand_layout(index, assignment, self.mesh)
            passed = tuple(p for p in kept if self.unsummed(value, p[0]))
            layout = Layout(layout.shards, (*layout.partial, *passed))
            carried = (a for a, _ in kept if a != TIME and a not in layout.partial_axes)
            states = (*rule.varying(index, assignment), *varying, *carried)
            operands.append(self.move(value, layout, states, gradient=op.differentiable))
        local = frozenset(f for f in assignment if rule.kind(f) == LOCAL)
        if op.expand is not None and (local or not op.emit):
            self.expand(node, op.expand(site_of(node, self.specs(node)), local), operands)
            return
        if op.halo is not None and operands:
            site = site_of(node, self.specs(node))
            operands[0] = self.halo(node, operands[0], assignment, rule, op.halo(site))
        differentiable = op.differentiable and any(v.differentiable for v in sources)
        results = []
        for index, made in enumerate(node.results):
            layout = rule.result_layout(index, assignment, self.mesh)
            layout = Layout(layout.shards, (*layout.partial, *kept))
            check(layout, made.spec.shape, self.mesh, node.key)
            results.append(
                PValue(
                    made.name,
                    made.spec,
                    layout,
                    varying,
                    differentiable and made.spec.is_float and index not in op.detached,
                )
            )
        renamed = with_operands(node, tuple(v.name for v in operands))
        self.items.append(
            Compute(
                renamed, rule, tuple(assignment.items()), tuple(operands), tuple(results),
                self.adjacent(node, sources, operands),
            )
        )  # fmt: skip
        self.values.update((v.name, v) for v in results)
        self.makers.update((v.name, Maker(self.expanded or node.key)) for v in results)
        if all(v.name in self.pure for v in sources):
            self.pure.update(v.name for v in results)

    def adjacent(
        self, node: Node, sources: Sequence[PValue], operands: Sequence[PValue]
    ) -> tuple[int, ...]:
        """The arguments that lie one after the other, where nothing moves them."""
        moved = {i for i, (one, other) in enumerate(zip(sources, operands, strict=True))
                 if one is not other}  # fmt: skip
        there = self.owner.adjacent(self.prefix, node)
        return tuple(p for p in there if moved.isdisjoint(operands_at(node, p)))

    def passing(
        self, op: OpDef, node: Node, sources: tuple[PValue, ...]
    ) -> tuple[tuple[str, str], ...]:
        """Partial sums that this operator need not wait for: over time, and scalars over any axis.

        What depends on the batch alone (a count of tokens) is summed where it is read instead. In
        space no other operand may have a gradient, which would be multiplied by the rank's own
        part, unless the operator carries sums of any size: then that gradient is partial, too.
        """
        made = [v.spec for v in node.results]
        if node.kwarg("rounding_mode") or not all(s.is_float for s in made):
            return ()
        axes = {a for v in sources for a, reduction in v.layout.partial if reduction == "sum"}
        scalar = not any(s.shape for s in (*made, *(v.spec for v in sources)))
        kept = []
        for axis in self.mesh.names:
            flags = tuple(self.unsummed(v, axis) for v in sources)
            others = any(v.differentiable for v, f in zip(sources, flags, strict=True) if not f)
            waits = axis != TIME and op.linear != "carried" and (others or not scalar)
            if axis not in axes or waits:
                continue
            shared = axis == TIME and _adds(node)  # numbers are: see `in_shares`
            if op.passes_partial(node, flags) or (shared and all(flags)):
                kept.append((axis, "sum"))
        return tuple(kept)

    def in_shares(self, node: Node) -> Node:
        """An addition to a sum over microbatches: each of them adds its share of what is the same
        for all (a penalty of weights, zeros that losses are added to), so that it counts once.
        """
        flags = [self.unsummed(self.values[name], TIME) for name in node.refs]
        floats = all(value.spec.is_float for value in node.results)
        if not _adds(node) or not any(flags) or not floats:
            return node
        args: list[Arg] = []
        for arg in node.args[:2]:
            if isinstance(arg, Ref):
                value = self.values[arg.name]
                same = not self.unsummed(value, TIME) and value.layout.shard(TIME) is None
                args.append(self.share(node, arg) if same else arg)
            else:
                args.append(arg / self.owner.steps if isinstance(arg, int | float) else arg)
        return replace(node, args=(*args, *node.args[2:]))

    def share(self, node: Node, arg: Ref) -> Ref:
        """A sum over microbatches that comes to `arg`, made for `node`."""
        spec, dtype = self.values[arg.name].spec, node.results[0].spec.dtype
        if spec.dtype != dtype:  # integers have no shares, and torch would take float32 for them
            spec = replace(spec, dtype=dtype)
            arg = Ref(self.beside(node, "_to_copy", (arg,), spec, dtype=Dtype(dtype)))
        name = self.beside(node, "mul", (arg, 1 / self.owner.steps), spec)
        item = self.items.pop()
        assert isinstance(item, Compute)
        (found,) = item.results
        layout = Layout(found.layout.shards, (*found.layout.partial, (TIME, "sum")))
        summed = replace(found, layout=layout)
        self.items.append(replace(item, results=(summed,)))
        self.values[name] = summed
        self.pure.discard(name)
        return Ref(name)

    def beside(
        self, node: Node, op: str, args: tuple[Arg, ...], spec: TensorSpec, **kwargs: Arg
    ) -> str:
        """Lower another operator for `node`, of one operand, as that lies: its result's name."""
        (operand,) = (self.values[arg.name] for arg in args if isinstance(arg, Ref))
        name = self.fresh(f"{operand.name.split('__')[0]}__share")
        made = replace(
            node,
            op=op,
            args=args,
            kwargs=tuple(kwargs.items()),
            results=(Value(name, spec),),
            path=f"{node.path}.{node.op}".lstrip("."),
        )
        layouts = (operand.layout.without(operand.layout.partial_axes),)
        rule = op_of(made).rule(site_of(made, self.specs(made)))
        rule = cut_to(rule, layouts, self.mesh)
        self.lower_node(made, rule, dict(follow(rule, layouts, self.mesh)))
        self.makers[name] = Maker(self.expanded or node.key)
        return name

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
        if self.owner.steps == 1 or any(TIME in axes for axes in assignment.values()):
            return assignment
        lying = follow(rule, tuple(_only_time(v.layout) for v in sources), self.mesh)
        carried = any(v.layout.shard(TIME) for v in sources)
        if carried and not lying:
            raise self.mixes(node)
        return assignment | {f: (TIME, *assignment.get(f, ())) for f in lying}

    def mixes(self, node: Node) -> LayoutError:
        """The error of an operator that needs more than one microbatch at once."""
        return LayoutError(
            f"{node_key(self.prefix, node)} ({node.source}): operator {node.op!r} mixes"
            f" samples, or has groups of them that {self.owner.steps} microbatches do not"
            f" divide; {WAY_ON}"
        )

    def expand(self, node: Node, program: Function, operands: list[PValue]) -> None:
        """Lower a local program in place of `node`; inner operators take operands as they lie."""
        outer = self.values
        within, self.expanded = self.expanded, self.expanded or node.key
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
        self.expanded = within

    def fresh(self, name: str) -> str:
        """A value name that this function does not use yet."""
        result, count = name, 1
        while result in self.names:
            count += 1
            result = f"{name}_{count}"
        self.names.add(result)
        return result

    def halo(
        self, node: Node, value: PValue, assignment: Assignment, rule: Rule,
        rows: Mapping[str, tuple[int, int, int]],
    ) -> PValue:  # fmt: skip
        """Exchange border rows for every sharded halo factor; those of other microbatches are not
        there.
        """
        for factor, axes in assignment.items():
            if rule.kind(factor) != HALO:
                continue
            dim, below, above = rows[factor]
            if not below and not above:
                continue
            if TIME in axes:
                raise self.mixes(node)
            step = Step("halo_exchange", axes, value.layout, dim, halo=(below, above))
            value = self.emit(value, step, value.varying, ((dim, below, above), *value.halo))
        return value

    def move(
        self, value: PValue, layout: Layout, varying: tuple[str, ...], *, gradient: bool = True
    ) -> PValue:
        """`value` in another layout and cotangent state; equal requests share one chain.

        A reader that returns no gradient takes any chain that reaches the layout.
        """
        gradient = gradient and value.differentiable
        key = (value.name, layout, tuple(sorted(varying)) if gradient else None)
        if key in self.moved:
            return self.moved[key]
        if not gradient and (value.name, layout) in self.reached:
            return self.reached[value.name, layout]
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
            differentiable=gradient,
        )
        result = value
        vary = frozenset(value.varying)
        for step in steps:
            if TIME in step.axes and not step.row.startswith("partition"):
                raise LayoutError(
                    f"{self.at}: {value.name!r} is needed for the samples of all microbatches"
                    f" ({step.row}); {WAY_ON}"
                )
            if step.row == "reduce" and step.reduction != "sum" and value.differentiable:
                raise LayoutError(f"{value.name!r}: a {step.reduction} over shards has no gradient")
            vary = step.varying(vary)
            result = self.emit(result, step, tuple(sorted(vary)), gradient=gradient)
        self.moved[key] = result
        self.reached.setdefault((value.name, layout), result)
        return result

    def emit(
        self, value: PValue, step: Step, varying: tuple[str, ...],
        halo: tuple[tuple[int, int, int], ...] = (), *, gradient: bool = True,
    ) -> PValue:  # fmt: skip
        base = value.name.split("__")[0]
        name = self.fresh(f"{base}__{step.row.removesuffix('_varying')}_{'_'.join(step.axes)}")
        flows = gradient and value.differentiable
        result = PValue(name, value.spec, step.result, varying, flows, halo)
        self.items.append(Movement(step, value, result))
        moved = Maker(self.makers[value.name].key, moved=True)
        self.makers[name] = Maker(self.expanded) if self.expanded else moved
        if value.name in self.pure:
            self.pure.add(name)
        return result

    def hoisted(self, value: PValue, layout: Layout) -> PValue:
        """Replace a sum over microbatches of a batch-only value by the prologue's result."""
        if not self.top or value.differentiable or value.name not in self.pure:
            alone = not (value.differentiable or self.top)
            what = "is made in a block" if alone else "depends on parameters"
            raise LayoutError(
                f"{self.at}: {value.name!r} is needed as a sum over all samples before any"
                f" microbatch goes on, and {what}; {WAY_ON}"
            )
        kept = ((TIME, "sum"),)
        items = _ancestors(self.items, value.name)
        earlier = {after.name for _, after in self.owner.hoist.values}
        chained = any(v.name in earlier for item in items for v in operands_of(item))
        if kept[0] not in value.layout.partial or chained:
            what = "depends on another such sum" if chained else "is no sum"
            raise LayoutError(
                f"{self.at}: value {value.name!r} combines all microbatches and {what}; {WAY_ON}"
            )
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
        self.makers[result.name] = self.makers[made.name]
        hoist.values.append((made, result))
        return result


def _adds(node: Node) -> bool:
    """Whether an operator adds its first two arguments, with factors of any sign."""
    return op_of(node).linear == "joint" and {name for name, _ in node.kwargs} <= {"alpha"}


def _passing_varying(
    op: OpDef, sources: tuple[PValue, ...], assignment: Assignment
) -> tuple[str, ...]:
    """Axes over which an operator leaves partial cotangents as they are.

    It computes the same on all ranks there, and every gradient that leaves it is partial: those of
    its results may be so too, and nothing needs to be summed in between.
    """
    states = [set(v.varying) for v in sources if v.differentiable]
    if not op.differentiable or not states:
        return ()
    used = {a for axes in assignment.values() for a in axes}
    return tuple(sorted(set.intersection(*states) - used))


def _only_time(layout: Layout) -> Layout:
    return Layout(tuple(s for s in layout.shards if s.axis == TIME))


def _ancestors(items: list[Item], name: str) -> list[Item]:
    """The items that `name` depends on, in order."""
    needed, found = {name}, []
    for item in reversed(items):
        if any(v.name in needed for v in results_of(item)):
            found.append(item)
            needed.update(v.name for v in operands_of(item))
    return found[::-1]
