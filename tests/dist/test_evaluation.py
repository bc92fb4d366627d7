"""Evaluation under any plan: programs that differ from what was trained, against one device."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import runtime as rt
from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import data_parallel, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import LayoutError
from parloom.execute.program import CompiledStages, evaluation_program, training_program
from parloom.execute.reference import evaluate
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, widened
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG, Movement
from parloom.ir.plan import Decisions, ModelSource, NodeDecision, Optimizer, Plan, one_stage
from parloom.ir.text import print_graph
from parloom.rewrite.pad import paddings
from parloom.rewrite.rewrites import rewritten
from tests.dist import staged
from tests.dist.test_at_once import merged

TOLERANCE = 1e-9
Tensors = dict[str, Tensor]


class TwoModes(nn.Module):
    """Evaluates by running statistics, without dropout, at half the resolution.

    What comes after the pool has other shapes than in training under the same operator keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.mix = nn.Conv2d(6, 12, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 6)

    def forward(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm(self.stem(image)))
        if not self.training:
            x = F.avg_pool2d(x, 2)
        x = F.relu(self.mix(x))
        x = self.drop(x.mean((2, 3)))
        logits = self.head(x)
        return F.cross_entropy(logits, labels), logits.softmax(-1)


class Classes(nn.Module):
    """Eleven classes, padded for training; evaluation reads the logits as no loss would."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(torch.tanh(self.hidden(self.table(ids))))
        logits = F.linear(x, self.table.weight)
        return F.cross_entropy(logits, labels), logits.softmax(-1)


def _two_modes() -> tuple[nn.Module, Tensors]:
    return TwoModes(), {"image": torch.randn(12, 3, 6, 6), "labels": torch.randint(0, 6, (12,))}


def _classes() -> tuple[nn.Module, Tensors]:
    return Classes(), {"ids": torch.randint(0, 11, (12,)), "labels": torch.randint(0, 11, (12,))}


BUILDERS: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    "two_modes": _two_modes,
    "classes": _classes,
    "cnn": lambda: zoo.build("cnn", batch=12, channels=6, depth=1, classes=12, image=12),
}


@dataclass(frozen=True)
class Modes:
    """A model's two programs in float64, with its values and a batch."""

    training: Graph
    evaluation: Graph
    tensors: Tensors
    batch: Tensors

    def plan(self, decisions: Decisions) -> Plan:
        return Plan(
            ModelSource("test"),
            "4xcpu",
            "0" * 8,
            Optimizer("sgd", 0),
            "random",
            decisions,
            print_graph(self.training),
            evaluation_graph=print_graph(self.evaluation),
        )

    def programs(self, decisions: Decisions) -> tuple[CompiledStages, CompiledStages]:
        """The training and the evaluation program of a plan."""
        plan = self.plan(decisions)
        training = training_program(plan)
        evaluation = evaluation_program(plan, training.lowered)
        assert evaluation is not None
        return training, evaluation


@cache
def modes(name: str) -> Modes:
    torch.manual_seed(0)
    module, batch = BUILDERS[name]()
    training = widened(capture(module, batch))
    evaluation = widened(capture(module, batch, training=False))
    tensors = {
        n: t.detach().double() + 0.1 * torch.rand(t.shape).double() if t.is_floating_point() else t
        for n, t in parameters_of(module, training).items()
    }
    wide = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    return Modes(training, evaluation, tensors, wide)


def error(model: Modes, decisions: Decisions) -> float:
    """The largest difference of loss and outputs from one device, before and after a step."""
    training, evaluation = model.programs(decisions)

    def rank(comm: rt.Comm) -> float:
        trainer = rt.Trainer(
            training.pipeline,
            model.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            comm=comm,
            evaluation=evaluation.pipeline,
        )
        worst = _apart(model, trainer)
        trainer.step(model.batch)
        return max(worst, _apart(model, trainer))

    return max(rt.run_threads(training.pipeline.mesh, rank))


def _apart(model: Modes, trainer: rt.Trainer) -> float:
    state = trainer.state_dict()
    values = {
        i.value.name: (model.batch if i.kind == "batch" else state)[i.target]
        for i in model.evaluation.inputs
        if i.kind != "constant"
    }
    expected = evaluate(model.evaluation, values)
    found = trainer.evaluate(model.batch)
    assert expected["loss"] is not None
    assert found.outputs.keys() == expected["outputs"].keys()
    pairs = [(found.loss, expected["loss"])]
    pairs += [(found.outputs[n], expected["outputs"][n]) for n in found.outputs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


MESHES = {"2x2": grid({"x": 2, "y": 2}), "2x3": grid({"x": 2, "y": 3})}


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BUILDERS)
def test_evaluation_equals_one_device(name: str, mesh: str, seed: int) -> None:
    model = modes(name)
    plan = random_plan(model.training, factorize(model.training), MESHES[mesh], seed)
    assert error(model, plan) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BUILDERS)
def test_pipelines_evaluate(name: str, seed: int) -> None:
    """Outputs and loss of the stages that have them, on every rank."""
    model = modes(name)
    rng = random.Random(seed)
    stages = staged.randomly_cut(model.training, 3, rng)
    count = 3 if name == "classes" else 1  # batch norm trains on the whole batch
    plan = staged.drawn(
        model.training, stages, [1, 2, 1][: len(stages)], num_microbatches=count, seed=seed
    )
    assert error(model, plan) < TOLERANCE


@pytest.mark.parametrize("microbatches", [1, 2])
def test_padded_classes_are_cut_where_evaluation_reads_them_otherwise(microbatches: int) -> None:
    model = modes("classes")
    (padding,) = paddings(model.training, 4)
    rewrites = (str(padding),)
    graph = rewritten(model.training, rewrites)
    for seed in range(3):
        drawn = random_plan(graph, factorize(graph), MESHES["2x2"], seed, microbatches)
        plan = Decisions(
            drawn.stages,
            drawn.nodes,
            drawn.parameters,
            num_microbatches=microbatches,
            rewrites=rewrites,
        )
        assert error(model, plan) < TOLERANCE


@pytest.mark.parametrize("count", [1, 3])
def test_evaluation_has_the_microbatches_of_training(count: int) -> None:
    """A plan that fits because it cuts the batch evaluates it so, too."""
    model = modes("classes")
    (plan,) = data_parallel(model.training, load_cluster("4xcpu"))
    plan = replace(plan, num_microbatches=count)
    _, evaluation = model.programs(plan)
    assert evaluation.only.program.num_microbatches == count
    assert error(model, plan) < TOLERANCE


@pytest.mark.parametrize("at_once", [[1, 2], [4, 1]])
def test_stages_with_other_microbatches_evaluate_the_whole_batch(at_once: list[int]) -> None:
    model, tried = modes("classes"), 0
    for seed in range(8):
        try:
            plan = merged(model.training, [1, 1], at_once, seed)
        except LayoutError:
            continue
        assert error(model, plan) < TOLERANCE
        tried += 1
    assert tried


class LargestLoss(nn.Module):
    """Evaluates by the worst sample: no sum over microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        each: Tensor = self.layer(x).square().sum(-1)
        loss: Tensor = each.mean() if self.training else each.max()
        return loss


def test_what_is_no_sum_is_evaluated_at_once() -> None:
    torch.manual_seed(0)
    module, batch = LargestLoss().double(), {"x": torch.randn(12, 8, dtype=torch.float64)}
    training, evaluation = capture(module, batch), capture(module, batch, training=False)
    model = Modes(training, evaluation, parameters_of(module, training), batch)
    plan = Decisions(one_stage(grid({"x": 2})), num_microbatches=3)
    assert model.programs(plan)[1].only.program.num_microbatches == 1
    assert error(model, plan) < TOLERANCE


def test_the_operators_of_evaluation_alone_lie_like_their_neighbors() -> None:
    """Batch norm by running statistics and the pool take samples as they come: nothing moves."""
    model = modes("two_modes")
    (plan,) = data_parallel(model.training, load_cluster("4xcpu"))
    training, evaluation = model.programs(plan)
    assert (
        evaluation.only.program.inputs == training.only.program.inputs
    )  # a rank's own samples serve both
    assert moved(evaluation.only.pcg) == []
    assert evaluation.only.pcg.outputs[0][1].layout == Layout((Shard("data", 0, 3),))


def moved(pcg: PCG) -> list[tuple[str, str]]:
    """(movement, value) of everything that leaves a rank, scalars excepted."""
    bodies = (pcg.main.body, *(f.body for f in pcg.functions))
    moves = (i for body in bodies for i in body if isinstance(i, Movement) and i.operand.spec.shape)
    return [(m.step.row, m.operand.name) for m in moves if not m.step.row.startswith("partition")]


class Wide(nn.Module):
    """Evaluation skips the first product: what was the second is the first, under its key."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, 8))
        self.up = nn.Parameter(torch.randn(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.linear(F.linear(x, self.down), self.up).square().sum()
        return F.linear(x[:, :4], self.up).square().sum()


def test_parameters_are_read_where_they_are_stored() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8)}
    module = Wide()
    training, evaluation = capture(module, batch), capture(module, batch, training=False)
    first, second = [key for key, node in training.unfolded() if node.op == "linear"]
    model = Modes(training, evaluation, parameters_of(module, training), batch)
    nodes = (NodeDecision(first, (("k", ("x",)),)), NodeDecision(second, (("n", ("x",)),)))
    compiled = model.programs(Decisions(one_stage(grid({"x": 2})), nodes))
    homes = {p.input.target: p.layout for p in compiled[0].only.pcg.parameters}
    assert homes["up"] == Layout((Shard("x", 0, 8),))
    assert {p.input.target: p.layout for p in compiled[1].only.pcg.parameters} == homes
    stored = {p.input.value.name for p in compiled[1].only.pcg.parameters}
    assert [name for _, name in moved(compiled[1].only.pcg) if name in stored] == []


def test_evaluation_has_no_gradients() -> None:
    """No cotangent is planned for, so nothing is refused or moved for one."""
    model = modes("cnn")
    plan = random_plan(model.training, factorize(model.training), MESHES["2x2"], 0)
    _, evaluation = model.programs(plan)
    values = [
        v for f in (evaluation.only.pcg.main, *evaluation.only.pcg.functions) for v in f.inputs
    ]
    assert not any(v.differentiable for v in values)
    rows = {r for r, _ in moved(evaluation.only.pcg)}
    assert not rows & {"replicate", "elect", "combine_varying", "reduce_varying"}
