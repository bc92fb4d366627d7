"""Beside training: what a plan of a random module must refuse, or do as a single process does.

Each check returns what went wrong silently, or nothing.
"""

import random
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from module_source import Source
from torch import Tensor
from torch.utils.data import DistributedSampler

from parloom import api
from parloom import runtime as rt
from parloom.capture import load_model
from parloom.errors import InputError, ParloomError
from parloom.execute.program import training_program
from parloom.execute.same_model import check_program
from parloom.ir.factors import factorize
from parloom.ir.graph import Node
from parloom.ir.plan import NodeDecision, Plan
from parloom.ir.plan_json import plan_to_json
from parloom.ir.text import parse_graph

# A module with the same parameters that computes something else.
OTHERS = (
    ("F.gelu(", "F.relu("),
    ("nn.ReLU(inplace=True)", "nn.Tanh()"),
    ("nn.LayerNorm(8)", "nn.LayerNorm(8, eps=1e-3)"),
    ("True) + 1e-6", "True) + 1e-3"),
    ("nn.GroupNorm(2, 8)", "nn.GroupNorm(4, 8)"),
    ("batch_first=True", "batch_first=False"),
    ("is_causal=True", "is_causal=False"),
    ("nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=0.3)"),
    ("lerp_(h.mean((0, 1)), 0.1)", "lerp_(h.mean((0, 1)), 0.2)"),
    ("0.1 * h.detach()", "0.2 * h.detach()"),
    ("linspace(0.5, 1.5, 8)", "linspace(0.5, 1.6, 8)"),
    ("clamp(-3, 3)", "clamp(-2, 2)"),
    ("x * x.sigmoid()", "x * x.tanh()"),
    ("0.5 * out", "0.25 * out"),
    ("% 3 == 0", "% 3 == 1"),
    ("Dropout(0.2)", "Dropout(0.3)"),
    ("0.1 * torch.randn_like", "0.2 * torch.randn_like"),
    ("ignore_index=-1", "ignore_index=-1, label_smoothing=0.1"),
    ("Loss(0.3)", "Loss(0.4)"),
    ("h.abs().mean()", "h.square().mean()"),
    ("logits.abs().mean()", "logits.square().mean()"),
    ("out.std()", "out.var()"),
    ("[..., :8] - x", "[..., 8:] - x"),
    ("labels >= 0", "labels >= 1"),
)
HOSTILE = ("inductor._reinterpret_tensor", "inductor._alloc_from_pool", "set_", "resize_",
           "from_file", "_unsafe_view_out", "storage_offset")  # fmt: skip


def another_model(plan: Plan, made: Source, folder: Path, seed: int) -> str:
    """A model with one thing changed is not the one that was planned."""
    draw = random.Random(seed)
    found = [pair for pair in OTHERS if pair[0] in made.text]
    if not found:
        return ""
    old, new = draw.choice(found)
    path = folder / f"other_{seed}.py"
    path.write_text(made.text.replace(old, new), encoding="utf-8")
    other = load_model(f"{path}:factory")
    try:
        check_program(other.model, other.batch, other.loss, plan, parse_graph(plan.graph))
    except ParloomError:
        return ""
    return f"the plan of {old} takes {new}"


def own_samples(plan: Plan, spec: str, tolerance: float) -> str:
    """A step on each rank's own samples is the step on the global batch."""
    loaded = load_model(spec)
    program = training_program(plan).only.program
    tensors = dict((*loaded.model.named_parameters(), *loaded.model.named_buffers()))
    size = next(iter(loaded.batch.values())).shape[0]

    def rank(comm: rt.Comm) -> tuple[Tensor, Tensor, str]:
        def trainer() -> rt.Trainer:
            return rt.Trainer(
                program,
                tensors,
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05),
                comm=comm,
            )

        whole, own = trainer(), trainer()
        replicas, index = own.sampler_position
        everything: Any = range(size)
        sampler: Any = DistributedSampler(everything, replicas, index, shuffle=False)
        # A sampler deals samples out in turn; the global batch has them in the order of the ranks.
        order = [i for r in range(replicas) for i in range(r, size, replicas)]
        one = whole.step({n: t[order] for n, t in loaded.batch.items()}).loss
        try:
            return one, own.step({n: t[list(sampler)] for n, t in loaded.batch.items()},
                                 local=True).loss, ""  # fmt: skip
        except InputError as error:
            return one, one, str(error)

    for number, (one, other, _) in enumerate(rt.run_threads(program.mesh, rank)):
        if not abs(float(one - other)) <= tolerance * max(abs(float(one)), 1.0):
            return f"rank {number} has loss {float(other)} on its own samples, {float(one)} on all"
    return ""


def crossed(plan: Plan) -> Plan | None:
    """The plan with the samples of its inputs over axes in turn; None where it has one axis."""
    axes = [axis.name for axis in plan.decisions.mesh.axes]
    if len(axes) < 2:
        return None
    graph = parse_graph(plan.graph)
    factored = factorize(graph)
    inputs = [e.value.name for e in graph.of_kind("batch")]
    nodes = {n.key: n for n in plan.decisions.nodes}
    for node in graph.main.body:
        if not isinstance(node, Node):
            continue
        rule = factored.rule(graph.main.name, node)
        for operand, dims in zip(node.refs, rule.operands, strict=True):
            if operand not in inputs or not dims or not dims[0]:
                continue
            if dims[0][0] in rule.shardable:
                axis = axes[inputs.index(operand) % len(axes)]
                nodes[node.key] = NodeDecision(node.key, ((dims[0][0], (axis,)),))
    return replace(plan, decisions=replace(plan.decisions, nodes=tuple(nodes.values())))


def hostile_file(plan: Plan, seed: int) -> str:
    """A plan file that calls an operator that is no function of tensors is not read."""
    draw = random.Random(seed)
    kinds = {"parameter", "buffer", "batch", "constant"}
    calls = sorted({m.group(1) for m in re.finditer(r"= ([a-z_]+)\(", plan.graph)} - kinds)
    if not calls:
        return ""
    old, new = draw.choice(calls), draw.choice(HOSTILE)
    graph = plan.graph.replace(f"= {old}(", f"= {new}(")
    changed = plan_to_json(replace(plan, graph=graph))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(changed, encoding="utf-8")
        try:
            training_program(api.load(path))
        except ParloomError:
            return ""
    return f"a plan file that calls {new} in place of {old} is taken"


def finite(losses: list[Tensor]) -> str:
    """Draws make no NaN."""
    return "" if all(bool(x.isfinite()) for x in losses) else "the loss of a plan is not finite"
