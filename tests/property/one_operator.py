"""A program around one operator, its legal assignments, and its reference.

Parameters and batch tensors enter the operator directly or through copies; its results enter the
loss as sums weighted by batch tensors, and leave as outputs. What stands around the operator gets
random layouts of its own, so that all movements occur.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom import runtime as rt
from parloom.execute.reference import run_node
from parloom.execute.verify import Masks
from parloom.ir.factors import Factored, factorize, site_of
from parloom.ir.graph import Arg, Dtype, Function, Graph, Input, Node, Ref, TensorSpec, Value
from parloom.ir.layout import Layout, local_shape
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh, grid
from parloom.ir.ops import OPS, Emission, Rule, Site
from parloom.ir.ops.rule import HALO, RING, WHOLE
from parloom.ir.pcg import PCG
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from tests.equality import Outcome, difference, parallel
from tests.property.operator_cases import Case, Operand

Assignment = dict[str, tuple[str, ...]]

SQUARE, OBLONG, THREE = grid({"x": 2, "y": 2}), grid({"x": 2, "y": 3}), grid({"y": 3})
# What stands around the operator: "whole", "readers" (whole, but the results are read by ranks that
# share them and differ in what they do with them), or random layouts of a seed.
Around = str | int
ANCHOR = "anchor"  # a parameter that every loss reaches


@dataclass(frozen=True)
class Program:
    """A case made into tensors and a graph; `copied` puts copies in front of the operator."""

    case: Case
    copied: bool = False
    seed: int = 0

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The tensor arguments in order, each once."""
        found: dict[Operand, None] = {}

        def visit(arg: Any) -> None:
            if isinstance(arg, Operand):
                found.setdefault(arg)
            elif isinstance(arg, tuple):
                for inner in arg:
                    visit(inner)

        visit((self.case.args, tuple(v for _, v in self.case.kwargs)))
        return tuple(found)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return {f"t{i}": o.draw(generator) for i, o in enumerate(self.operands)}

    def as_given(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """The operands as the operator takes them: pairs of real numbers are complex ones."""
        given = zip(leaves.items(), self.operands, strict=True)
        return {n: torch.view_as_complex(t) if o.is_complex else t for (n, t), o in given}

    def node(self, names: tuple[str, ...], results: tuple[Value, ...]) -> Node:
        def visit(arg: Any) -> Arg:
            if isinstance(arg, Operand):
                return Ref(names[self.operands.index(arg)])
            if isinstance(arg, tuple):
                return tuple(visit(inner) for inner in arg)
            assert arg is None or isinstance(arg, Dtype | bool | int | float | str)
            return arg

        kwargs = tuple((name, visit(value)) for name, value in self.case.kwargs)
        args = tuple(visit(a) for a in self.case.args)
        return Node(self.case.op, args, kwargs, results, "layer", 0, "case.py:1")

    def run(self, leaves: dict[str, Tensor]) -> list[Tensor]:
        """The operator on one device."""
        leaves = self.as_given(leaves)
        node = self.node(tuple(leaves), ())
        if self.case.oracle is not None:
            made = self.case.oracle(*_given(node.args, leaves))
            return list(made) if isinstance(made, tuple) else [made]
        return run_node(node, node.key, leaves, Masks())

    @cached_property
    def results(self) -> tuple[Value, ...]:
        with torch.no_grad():
            made = self.run(self.tensors)
        return tuple(Value(f"r{i}", _spec(t)) for i, t in enumerate(made))

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the real results in the loss, those of buffer updates excepted.

        They have a dim more than the result, so that the result may be read by ranks that share it.
        """
        generator = torch.Generator().manual_seed(self.seed + 1)
        return {
            f"w_{v.name}": torch.randn(
                (6, *_real(v).spec.shape), generator=generator, dtype=torch.float64
            )
            for i, v in enumerate(self.results)
            if v.spec.is_float and i not in self.case.updates
        }

    @property
    def batch(self) -> dict[str, Tensor]:
        given = zip(self.tensors.items(), self.operands, strict=True)
        return {n: t for (n, t), o in given if o.role == "batch"} | self.weights

    @property
    def state(self) -> dict[str, Tensor]:
        given = zip(self.tensors.items(), self.operands, strict=True)
        return {n: t for (n, t), o in given if o.role != "batch"} | {
            ANCHOR: torch.ones(1, dtype=torch.float64)
        }

    @cached_property
    def graph(self) -> Graph:
        roles = [o.role for o in self.operands]
        values = [Value(n, _spec(t)) for n, t in self.tensors.items()]
        inputs = [
            Input(v, role, v.name, role == "parameter" and v.spec.is_float)
            for v, role in zip(values, roles, strict=True)
        ]
        anchor = Value(ANCHOR, TensorSpec((1,), "float64"))
        inputs.append(Input(anchor, "parameter", ANCHOR, True))
        inputs += [Input(Value(n, _spec(t)), "batch", n) for n, t in self.weights.items()]
        body: list[Node] = []
        names = tuple(v.name for v in values)
        if self.copied:
            for i, (value, role) in enumerate(zip(values, roles, strict=True)):
                if role != "buffer":
                    copy = Value(f"c_{value.name}", value.spec)
                    body.append(Node("clone", (Ref(value.name),), (), (copy,), "copy", i))
            names = tuple(
                n if r == "buffer" else f"c_{n}" for n, r in zip(names, roles, strict=True)
            )
        names = tuple(self._complex(body, names))
        body.append(self.node(names, self.results))
        body += self._loss()
        buffers = [v.name for v, r in zip(values, roles, strict=True) if r == "buffer"]
        updated = tuple(self.results[i].name for i in self.case.updates)
        updates = tuple(zip(buffers, updated, strict=True)) if updated else ()
        outputs = tuple((v.name, _real(v).name) for v in self.results if v.name not in updated)
        main = Function(
            "main", tuple(i.value for i in inputs), tuple(body),
            ("loss", *(v for _, v in (*updates, *outputs))),
        )  # fmt: skip
        return Graph("Case", (), main, tuple(inputs), "loss", outputs, updates)

    def _complex(self, body: list[Node], names: tuple[str, ...]) -> Iterator[str]:
        """The operands' names, after conversions of those that are complex."""
        for name, operand in zip(names, self.operands, strict=True):
            if operand.is_complex:
                made = Value(f"z_{name}", TensorSpec(operand.shape, operand.dtype))
                body.append(Node("view_as_complex", (Ref(name),), (), (made,), "pairs", len(body)))
                name = made.name
            yield name

    def _loss(self) -> Iterator[Node]:
        scalar = TensorSpec((), "float64")
        specs = {v.name: _real(v).spec for v in self.results}
        for i, value in enumerate(self.results):
            if _real(value) != value:
                plain = Value(f"p_{value.name}", value.spec)
                yield Node("resolve_conj", (Ref(value.name),), (), (plain,), "loss", i)
                yield Node("view_as_real", (Ref(plain.name),), (), (_real(value),), "loss", i)
        yield Node("sum", (Ref(ANCHOR),), (), (Value("total", scalar),), "loss", 0)
        total = "total"
        for i, weight in enumerate(self.weights):
            name = weight.removeprefix("w_")
            made = Value(f"m_{name}", TensorSpec((6, *specs[name].shape), "float64"))
            read = next(_real(v).name for v in self.results if v.name == name)
            yield Node("mul", (Ref(read), Ref(weight)), (), (made,), "loss", i)
            yield Node("sum", (Ref(made.name),), (), (Value(f"s_{name}", scalar),), "loss", i + 1)
            last = i == len(self.weights) - 1
            fresh = Value("loss" if last else f"total_{i}", scalar)
            yield Node("add", (Ref(total), Ref(f"s_{name}")), (), (fresh,), "loss", i)
            total = fresh.name
        if not self.weights:
            yield Node("clone", (Ref(total),), (), (Value("loss", scalar),), "loss", 0)

    @cached_property
    def factored(self) -> Factored:
        return factorize(self.graph)

    @property
    def operator(self) -> Node:
        return next(n for n in self.graph.main.body if isinstance(n, Node) and n.path == "layer")

    @property
    def site(self) -> Site:
        return site_of(self.operator, self.graph.main.specs())

    @cached_property
    def rule(self) -> Rule:
        base = OPS[self.case.op].rule(self.site)
        return base.split(dict(self.case.parts))

    @cached_property
    def expected(self) -> Outcome:
        """The operator and its gradients by autograd, on one device."""
        leaves = {
            n: t.clone().requires_grad_(o.role == "parameter" and t.is_floating_point())
            for (n, t), o in zip(self.tensors.items(), self.operands, strict=True)
        }
        anchor = torch.ones(1, dtype=torch.float64, requires_grad=True)
        results = [
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in self.run(leaves)
        ]
        made = dict(zip((v.name for v in self.results), results, strict=True))
        loss = anchor.sum()
        for name, weight in self.weights.items():
            loss = loss + (made[name.removeprefix("w_")] * weight).sum()
        torch.autograd.backward(loss)
        gradients = {
            n: torch.zeros_like(t) if t.grad is None else t.grad
            for n, t in leaves.items()
            if t.requires_grad
        } | {ANCHOR: torch.ones(1, dtype=torch.float64)}
        updates = {buffer: made[v].detach() for buffer, v in self.graph.updates}
        kept = {i.target: self.tensors[i.target] for i in self.graph.of_kind("buffer")}
        outputs = {n: made[n].detach() for n, _ in self.graph.outputs}
        return Outcome(loss.detach(), gradients, outputs, kept | updates)

    def run_emitted(self) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """The emitted expression on whole tensors: operands, results, and what autograd keeps."""
        leaves = {
            n: t.clone().requires_grad_(o.role == "parameter" and t.is_floating_point())
            for (n, t), o in zip(self.tensors.items(), self.operands, strict=True)
        }
        site, whole = self.site, Layout()
        leaves = dict(
            zip(dict.fromkeys(site.node.refs), self.as_given(leaves).values(), strict=True)
        )
        emission = Emission(
            site, self.rule, {}, SQUARE, {n: n for n in leaves}, "'key'",
            (whole,) * len(site.operands), (whole,) * len(site.results),
        )  # fmt: skip
        ctx = rt.Context(rt.SingleComm(rt.grid({"x": 1})), exact_random=True)
        names = {"torch": torch, "F": F, "rt": rt, "ctx": ctx, **leaves}
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = eval(OPS[self.case.op].source(emission), names)
        return leaves, [made] if isinstance(made, Tensor) else list(made), kept

    def lowered(self, rule: Rule, assignment: Assignment, mesh: Mesh, around: Around) -> PCG:
        """The program with this assignment of the operator's rule."""
        key = self.operator.key
        rules = dict(self.factored.rules) | {("main", key): rule}
        nodes = [NodeDecision(key, tuple(assignment.items()))]
        rng = random.Random(around)
        for (_, other), beside in rules.items():
            drawn: Assignment = {}
            if around == "readers" and other.startswith("loss:mul"):
                drawn = {beside.operands[1][0][0]: ("x",) if mesh is SQUARE else mesh.names}
            elif isinstance(around, int) and other != key:
                drawn = random_assignment(beside, mesh, rng)
            if drawn:
                nodes.append(NodeDecision(other, tuple(drawn.items())))
        decisions = Decisions(one_stage(mesh), tuple(nodes))
        return lower(self.graph, decisions, factored=Factored(self.graph, rules))

    def error(
        self, rule: Rule, assignment: Assignment, mesh: Mesh, around: Around
    ) -> tuple[float, str]:
        """How far the lowered program is from the reference, and where."""
        pcg = self.lowered(rule, assignment, mesh, around)
        return difference(self.expected, parallel(pcg, self.state, self.batch))


def _real(value: Value) -> Value:
    """The value as real numbers."""
    if not value.spec.dtype.startswith("complex"):
        return value
    return Value(f"v_{value.name}", TensorSpec((*value.spec.shape, 2), "float64"))


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def random_assignment(rule: Rule, mesh: Mesh, rng: random.Random) -> Assignment:
    """Each axis on a random factor that it divides, on both of a route, or on none."""
    assignment: Assignment = {}
    for axis in rng.sample(mesh.names, len(mesh.names)):
        places = (*rule.places[1:], ())
        fitting = [p for p in places if all(_fits(rule, assignment, f, axis, mesh) for f in p)]
        for factor in rng.choice(fitting):
            assignment[factor] = (*assignment.get(factor, ()), axis)
    return assignment


def _fits(rule: Rule, assignment: Assignment, factor: str, axis: str, mesh: Mesh) -> bool:
    return rule.size(factor) % mesh.size((*assignment.get(factor, ()), axis)) == 0


Trial = tuple[Mesh, Rule, Assignment]


def singles(rule: Rule) -> list[Trial]:
    """Each factor alone, over two ranks, with a copy of each, and over three."""
    found: list[Trial] = []
    for f in rule.shardable:
        found += [(SQUARE, rule, {f: ("x",)}), (THREE, rule, {f: ("y",)})]
    return [t for t in found if divides(*t)]


def combined(rule: Rule) -> list[Trial]:
    """Joint axes on a factor, pairs of factors, and inner parts of factors."""
    factors = rule.shardable
    found: list[Trial] = []
    for f in factors:
        found += [(SQUARE, rule, {f: ("x", "y")}), (OBLONG, rule, {f: ("y", "x")})]
        size = rule.size(f)
        if rule.kind(f) not in (HALO, WHOLE) and size % 4 == 0:
            cut = rule.split({f: (2, size // 2)})
            found += [(SQUARE, cut, {f"{f}1": ("y",)}), (OBLONG, cut, {f"{f}1": ("y",)})]
            found.append((SQUARE, cut, {f"{f}1": ("y",), f"{f}0": ("x",)}))
    for f, g in combinations(factors, 2):
        found += [(SQUARE, rule, {f: ("x",), g: ("y",)}), (OBLONG, rule, {f: ("x",), g: ("y",)})]
        found.append((OBLONG, rule, {f: ("y",), g: ("x",)}))
    return [t for t in found if divides(*t)]


def routed(rule: Rule) -> list[Trial]:
    """Axes on both factors of a route, beside others and in any order."""
    found: list[Trial] = []
    for f, g in rule.routes:
        found += [(SQUARE, *trial) for trial in striped(rule, f, g)]
        for mesh in (SQUARE, OBLONG):
            found += [
                (mesh, rule, {f: some, g: other})
                for some in (("x",), ("y",), ("x", "y"), ("y", "x"))
                for other in (("x",), ("y",), ("x", "y"), ("y", "x"))
                if {*some} & {*other}
            ]
            others = [h for h in rule.shardable if h not in (f, g)]
            found += [(mesh, rule, {f: ("x",), g: ("x",), h: ("y",)}) for h in others]
    return [t for t in found if divides(*t)]


def striped(rule: Rule, one: str, other: str) -> list[tuple[Rule, Assignment]]:
    """Positions of which a rank has every other one, or every other pair, where these are divided
    as the blocks of keys that go around are.
    """
    if rule.kind(other) != RING or any(rule.size(f) % 4 for f in (one, other)):
        return []
    single = rule.split({f: (rule.size(f) // 2, 2) for f in (one, other)})
    pairs = rule.split({f: (rule.size(f) // 4, 2, 2) for f in (one, other)})
    alone: Assignment = {f"{one}1": ("x",)}
    both = alone | {f"{other}1": ("x",)}
    return [(cut, assignment) for cut in (single, pairs) for assignment in (alone, both)]


def divides(mesh: Mesh, rule: Rule, assignment: Assignment) -> bool:
    """Whether every factor divides by the axes on it, and none is alone that must not be."""
    together = {*rule.routed(assignment, mesh)}
    return all(
        rule.size(f) % mesh.size(axes) == 0 and (rule.kind(f) != RING or {*axes} <= together)
        for f, axes in assignment.items()
    )


def local_site(site: Site, rule: Rule, assignment: Assignment, mesh: Mesh) -> Site:
    """The call as one rank sees it: specs of local shapes."""

    def local(spec: TensorSpec, layout: Layout) -> TensorSpec:
        return TensorSpec(local_shape(layout, spec.shape, mesh), spec.dtype)

    operands = tuple(
        local(s, rule.operand_layout(i, assignment, mesh)) for i, s in enumerate(site.operands)
    )
    results = tuple(
        Value(v.name, local(v.spec, rule.result_layout(i, assignment, mesh)))
        for i, v in enumerate(site.node.results)
    )
    return Site(replace(site.node, results=results), operands)


def _given(args: tuple[Any, ...], leaves: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Arguments with tensors in the place of values."""
    return tuple(
        leaves[own.name] if isinstance(own, Ref)
        else _given(own, leaves) if isinstance(own, tuple) else own
        for own in args
    )  # fmt: skip
