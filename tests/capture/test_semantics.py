"""What training scripts do besides a forward pass: captured to the bit, and equal when parallel."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parloom
from parloom.capture import capture, fingerprint, scalars_apart
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import CaptureError, InputError
from parloom.ir.graph import Call, Graph
from parloom.ir.mesh import grid
from parloom.ir.text import parse_graph, print_graph
from tests.capture.models import Batch, assert_equal
from tests.dist import lowered
from tests.equality import TOLERANCE

WIDTH, CLASSES = 8, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Lora(nn.Module):
    """A frozen linear layer with a trainable one of low rank beside it."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.outer(F.gelu(self.inner(x))))
        return out


class Net(nn.Module):
    """Three blocks on token embeddings, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return h

    def logits(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x))
        return out.flatten(0, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.logits(x), y.flatten())


class Tied(Net):
    """The embedding is the head's weight, and all blocks share one inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight
        for block in self.blocks:
            block.inner = self.blocks[0].inner


class OneBlock(Net):
    """The same module three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        for _ in range(3):
            h = self.blocks[0](h)
        return h


class SeveralLosses(Net):
    """A loss of its own per position of the output, an auxiliary one, all summed with weights."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.hidden(x)
        logits = self.head(h).flatten(0, 1)
        loss = F.cross_entropy(logits, y.flatten())
        auxiliary = torch.logsumexp(logits, -1).square().mean()
        balance = logits.softmax(-1).mean(0).square().sum() * CLASSES
        return {"loss": loss + 1e-2 * auxiliary + 0.1 * balance, "auxiliary": auxiliary}


class Masked(Net):
    """Some labels are -100, unevenly over samples; the others are smoothed and weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("importance", torch.tensor([1.0, 2.0, 0.5, 1.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = torch.where(torch.arange(y.numel()).view_as(y) % 5 < 2, -100, y)
        logits = self.logits(x)
        plain = F.cross_entropy(logits, y.flatten(), label_smoothing=0.1)
        weight = self.get_buffer("importance")
        return plain + F.cross_entropy(logits, y.flatten(), weight, label_smoothing=0.2)


class Counting(Net):
    """Buffers that forward updates: a count and a moving average over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        mean = self.get_buffer("mean")
        self.get_buffer("steps").add_(1)
        mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        return loss + (h - mean).square().mean()


class TwoLosses(Net):
    """Two losses of which the first is trained, a part of it, metrics, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.hidden(x)
        logits = self.head(h).flatten(0, 1)
        penalty = logits.square().mean()
        regression = self.size(h).square().mean()
        loss = F.cross_entropy(logits, y.flatten()) + penalty
        return {
            "classes": loss,
            "regression": regression,
            "penalty": penalty,
            "perplexity": loss.exp(),
            "hits": (logits.argmax(-1) == y.flatten()).sum(),
            "logits": logits,
        }


class Unused(Net):
    """A head that no loss reads, one that is read without a gradient, one used as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, CLASSES)
        self.target = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.hidden(x)
        with torch.no_grad():
            wanted = self.target(h)
        out = self.head(h)
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
        return loss + (out - wanted).square().mean(), self.spare(h)


class Checkpointed(Net):
    """Recomputes the first two blocks."""

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        for block in self.blocks[:2]:
            h = checkpoint(block, h, use_reentrant=False)
        out: Tensor = self.blocks[2](h)
        return out


class Autocast(Net):
    """The blocks in half precision, the head and the loss not."""

    def hidden(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                h = block(h)
        return h.float()


def lora() -> Net:
    model = Net()
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("inner", "outer"):
            setattr(block, name, Lora(block.get_submodule(name)))
    return model


def frozen() -> Net:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.tokens.requires_grad_(False)
    return model


def batch() -> Batch:
    return {"x": torch.randint(CLASSES, (8, 4)), "y": torch.randint(CLASSES, (8, 4))}


MODELS: tuple[Callable[[], nn.Module], ...] = (
    Tied, OneBlock, SeveralLosses, Masked, Counting, Unused, Checkpointed, Autocast, lora, frozen,
)  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_captured_and_parallel_equal_the_model(build: Callable[[], nn.Module]) -> None:
    model, example = build(), batch()
    graph = capture(model, example)
    assert_equal(graph, model, example)
    assert parse_graph(print_graph(graph)) == graph
    subject = lowered.of(model, example, graph)
    cluster = load_cluster("2x2xcpu")
    plans = [
        p for m in ("data_parallel", "fsdp", "megatron") for p in METHODS[m](graph, cluster, 1, 0)
    ]
    mesh = grid({"x": 2, "y": 2})
    plans += [random_plan(subject.graph, subject.factored, mesh, seed) for seed in (1, 2)]
    for plan in plans:
        error, where = subject.error(plan)
        assert error <= TOLERANCE, where


def trainable(graph: Graph) -> set[str]:
    return {i.target for i in graph.inputs if i.trainable}


def test_tied_and_shared_weights_are_one_input_each() -> None:
    aliases = {i.target: i.aliases for i in capture(Tied(), batch()).inputs if i.aliases}
    assert aliases == {
        "tokens.weight": ("head.weight",),
        "blocks.0.inner.weight": ("blocks.1.inner.weight", "blocks.2.inner.weight"),
        "blocks.0.inner.bias": ("blocks.1.inner.bias", "blocks.2.inner.bias"),
    }
    calls = [i for i in capture(OneBlock(), batch()).main.body if isinstance(i, Call)]
    assert [c.prefix for c in calls] == ["blocks.0", "blocks.0@1", "blocks.0@2"]


def test_parameters_without_a_gradient_are_left_alone() -> None:
    graph = capture(Unused(), batch())
    left = {i.target for i in graph.of_kind("parameter")} - trainable(graph)
    assert left == {"spare.weight", "spare.bias", "target.weight"}
    assert trainable(capture(lora(), batch())) == {
        f"blocks.{i}.{layer}.{part}.weight"
        for i in range(3)
        for layer in ("inner", "outer")
        for part in ("down", "up")
    }


def test_frozen_weights_are_stored_in_parts_and_have_no_gradient(tmp_path: Path) -> None:
    path = tmp_path / "factory_of_lora.py"
    path.write_text(FACTORY.format(name="lora"))
    plan = parloom.plan(
        f"{path}:build", cluster="4xcpu", devices=4, method="fsdp", pin=["*=weights:sharded"]
    )
    graph = parse_graph(plan.graph)
    stored = {p.name: p.weight.axes for p in plan.decisions.parameters}
    assert stored == {i.target: ("data",) for i in graph.of_kind("parameter")}
    assert plan.prediction is not None
    memory = dict(plan.prediction.memory)
    trained = sum(i.value.spec.num_elements for i in graph.of_kind("parameter") if i.trainable)
    assert memory["gradients"] <= 4 * trained  # 4 bytes each, before they are scattered
    assert memory["optimizer"] <= 4 * trained < memory["weights"]  # two states, in parts
    report = parloom.verify(plan)
    assert report.passed, report.first_difference
    kept = {i.target for i in graph.of_kind("parameter") if not i.trainable}
    assert {"blocks.0.inner.base.weight", "tokens.weight"} <= kept


class Integers(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.logits(x).argmax(-1).float().mean()


class Cut(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).detach(), y.flatten())


@pytest.mark.parametrize("kind", [Integers, Cut])
def test_a_loss_that_no_gradient_leaves_is_refused(kind: type[Net]) -> None:
    with pytest.raises(CaptureError, match=r"no trainable parameter \(20 are trainable; some are"):
        capture(kind(), batch())


def test_what_the_user_recomputes_is_known() -> None:
    graph = capture(Checkpointed(), batch())
    assert graph.recompute == ("blocks.0", "blocks.1")
    assert 'recompute "blocks.1"\n' in print_graph(graph)
    assert capture(Checkpointed(), batch(), training=False).recompute == ()


def test_weights_that_are_nan_are_named() -> None:
    model = Net()
    with torch.no_grad():
        model.get_parameter("blocks.1.inner.weight")[3, 2] = math.nan
        model.get_parameter("blocks.0.inner.weight")[0, 0] = math.inf
    with pytest.raises(InputError, match=r"'blocks\.1\.inner\.weight' of Net is NaN in 1 of 128 "):
        capture(model, batch())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.zeros(8, 4)}, r"Net\.tokens .*batch \(x: float32\[8, 4\], y: int64\[8, 4\]\)"),
        ({"y": torch.zeros(8, 4)}, r"Net .*batch \(x: int64\[8, 4\], y: float32\[8, 4\]\)"),
        ({"y": torch.zeros(8, 3, dtype=torch.int64)}, r"y: int64\[8, 3\]"),
        ({"labels": torch.zeros(8)}, "forward takes x, y, and the batch has 'labels' too"),
    ],
)
def test_a_wrong_batch_is_refused(change: Batch, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Net(), batch() | change)
    assert str(caught.value).startswith("cannot capture Net")


def test_freezing_makes_another_model() -> None:
    assert fingerprint(frozen(), batch()) != fingerprint(Net(), batch())


FACTORY = """
from tests.capture.test_semantics import {name}, batch

def build():
    return {name}(), batch()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Checkpointed", "2 blocks recomputed, as the model's checkpoints ask"),
        ("TwoLosses", "warning: scalar outputs that are no part of the loss, so that nothing is"),
        ("Unused", "3 parameters get no gradient from the loss and stay as they are: spare.weight"),
    ],
)
def test_plans_say_so(name: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "factory_of_semantics.py"
    path.write_text(FACTORY.format(name=name))
    plan = parloom.plan(f"{path}:build", cluster="4xcpu", devices=4, method="fsdp")
    assert any(text.startswith(line) for text in (*plan.assumptions, *plan.notes))
    asked = {a.prefix: a.policy for a in plan.decisions.activations}
    assert asked == dict.fromkeys(capture(*globals_of(name)).recompute, "recompute")


def test_scalars_apart_from_the_loss_are_named() -> None:
    evaluation = capture(TwoLosses(), batch(), training=False)
    assert scalars_apart(evaluation) == ("regression",)
    assert scalars_apart(capture(Net(), batch(), training=False)) == ()


def globals_of(name: str) -> tuple[nn.Module, Batch]:
    """A model of this file by its name."""
    kind: type[nn.Module] = globals()[name]
    return kind(), batch()
