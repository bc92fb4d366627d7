"""The model's own checkpoints: recomputed where they are blocks, reported where they are not."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parloom import api
from parloom.capture import capture
from parloom.comparators.baselines import random_plan
from parloom.ir.graph import Call, Graph
from parloom.ir.mesh import grid
from parloom.ir.plan import ActivationDecision, Decisions
from parloom.ir.text import parse_graph, print_graph
from parloom.report.words import checkpoint_words
from tests.capture.models import Batch, assert_equal, gpt2, llama
from tests.dist import lowered
from tests.equality import TOLERANCE

Built = tuple[nn.Module, Batch]
WIDTH = 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def t5() -> Built:
    """Its first blocks, which make the position bias, are unlike the others."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=37, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3,
        decoder_start_token_id=0, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(37, (2, 8))
    return T5ForConditionalGeneration(config).train(), {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    """Two layers; what is recomputed of them is for those who derive from it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.mix = nn.Linear(WIDTH, WIDTH), nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attend(x)).cumsum(1)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x)
        return out


class Inside(Block):
    """A part of the block is recomputed."""

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.mix, x, use_reentrant=False)
        return out


class Stage(nn.Module):
    """Blocks and a layer after them; `each` recomputes every block."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.down = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.each else block(x)
        out: Tensor = self.down(x)
        return out


class Net(nn.Module):
    """A stem, what `body` is, and a loss; in a region of autocast that is on or off, or in none."""

    cast: bool | None = None

    def __init__(self, body: Callable[[], nn.Module], count: int = 1, whole: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, WIDTH), nn.GELU())
        self.body = nn.ModuleList(body() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            h = self.run(x)
            for part in self.body:
                h = checkpoint(part, h, use_reentrant=False) if self.whole else part(h)
        loss: Tensor = F.softplus(self.head(h.float())).mean()
        return loss

    def region(self) -> AbstractContextManager[object]:
        if self.cast is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.cast)

    def run(self, x: Tensor) -> Tensor:
        h: Tensor = self.stem(x)
        return h


class Stem(Net):
    """A module that is in no list, and a function of its own, are recomputed."""

    def run(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(self.stem, x, use_reentrant=False)
        out: Tensor = checkpoint(lambda y: torch.tanh(y) * y.sigmoid(), h, use_reentrant=True)
        return out


def net(build: Callable[[], Net]) -> tuple[Net, Batch]:
    return build(), {"x": torch.randn(8, 4, 4)}


MODELS: dict[str, tuple[Callable[[], Net], tuple[str, ...], tuple[str, ...]]] = {
    "plain": (lambda: Net(Block, 3), (), ()),
    "blocks": (lambda: Net(Block, 3, whole=True), ("body.0", "body.1", "body.2"), ()),
    "one block": (lambda: Net(Block, 1, whole=True), ("body.0",), ()),
    "stage": (lambda: Net(lambda: Stage(False), 1, whole=True), ("body.0",), ()),
    "stages": (lambda: Net(lambda: Stage(False), 2, whole=True), ("body.0", "body.1"), ()),
    "nested": (
        lambda: Net(lambda: Stage(True), 1, whole=True),
        ("body.0.blocks.0", "body.0.blocks.1", "body.0.down"), (),
    ),
    "inside": (lambda: Net(Inside, 3), (), ("body.0.mix", "body.1.mix", "body.2.mix")),
    "stem": (lambda: Stem(Block, 2), ("stem",), ("Stem",)),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_are_recomputed_or_reported(name: str) -> None:
    build, recomputed, kept = MODELS[name]
    model, batch = net(build)
    graph = capture(model, batch)
    assert_equal(graph, model, batch)
    assert parse_graph(print_graph(graph)) == graph
    assert graph.recomputed_calls == recomputed
    assert set(graph.recompute) == {*recomputed, *kept}
    said = " | ".join(checkpoint_words(graph))
    assert ("as the model's checkpoints ask" in said) == bool(recomputed)
    assert all(path in said for path in kept)
    subject = lowered.of(model, batch, graph)
    for seed in range(3):
        plan = random_plan(subject.graph, subject.factored, grid({"x": 2, "y": 2}), seed)
        error, where = subject.error(with_recomputation(graph, plan))
        assert error <= TOLERANCE, where


class CastInside(Block):
    """Autocast begins inside of the checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize(
    ("name", "cast"), [("blocks", True), ("blocks", False), ("inside", True), ("stem", True)]
)
def test_checkpoints_inside_autocast_are_no_others(name: str, cast: bool) -> None:
    build, recomputed, kept = MODELS[name]
    model, batch = net(build)
    model.cast = cast
    graph = capture(model, batch)
    assert_equal(graph, model, batch)
    assert graph.recomputed_calls == recomputed
    assert set(graph.recompute) == {*recomputed, *kept}


def test_autocast_inside_a_checkpoint() -> None:
    model, batch = net(lambda: Net(CastInside, 2, whole=True))
    assert capture(model, batch).recompute == ("body.0", "body.1")


def with_recomputation(graph: Graph, plan: Decisions) -> Decisions:
    """A plan that does what the model asks."""
    asked = tuple(ActivationDecision(p, "recompute") for p in graph.recomputed_calls)
    return replace(plan, activations=asked)


FLAGS = """
import warnings
from tests.capture.models import gpt2, llama
from tests.capture.test_checkpoints import t5

def flagged():
    model, batch = {name}()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its older name is deprecated
        model.{flag}
    return model, batch
"""
OLDER = 'gradient_checkpointing_enable({"use_reentrant": True})'
NEWER = "activation_checkpointing_enable()"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("build", "flag", "number"),
    [
        (gpt2, OLDER, 2),
        (llama, "activation_checkpointing_enable(every_n_layers=2)", 1),
        (t5, NEWER, 4),
    ],
)
def test_flags_of_hugging_face(
    build: Callable[[], Built], flag: str, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "flagged_models.py"
    path.write_text(FLAGS.format(name=build.__name__, flag=flag))
    flagged = api.plan(f"{path}:flagged", cluster="2xcpu", method="data_parallel")
    blocks = [i.prefix for i in parse_graph(flagged.graph).main.body if isinstance(i, Call)]
    assert {a.prefix for a in flagged.decisions.activations} == set(blocks[:number])
    noun = "block" if number == 1 else "blocks"
    assert f"{number} {noun} recomputed, as the model's checkpoints ask" in flagged.assumptions
    kept = replace(flagged, decisions=replace(flagged.decisions, activations=()))
    without, recomputed = (api.simulate(plan).prediction() for plan in (kept, flagged))
    assert dict(recomputed.memory)["activations"] < 0.9 * dict(without.memory)["activations"]
    assert recomputed.step_s >= without.step_s
    if build is llama:  # some of its blocks
        report = api.verify(flagged)
        assert report.passed, report.first_difference


def test_without_flags_nothing_is_recomputed() -> None:
    assert not capture(*gpt2()).recompute
