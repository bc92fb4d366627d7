"""Where lowering once went wrong: scalars with a gradient, hoists, names, windows that overhang."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom.comparators.baselines import data_parallel, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import LayoutError
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import Movement
from tests.dist.lowered import of

LIMIT = 1e-9


class Weighted(nn.Module):
    """A loss weighted by a learned scalar: the scalar's gradient needs the whole loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.log_var = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        loss = F.mse_loss(self.layer(x), y)
        return (torch.exp(-self.log_var) * loss + self.log_var,)


class Lengths(nn.Module):
    """A maximum over the batch, which depends on the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor]:
        return ((self.layer(x) / lengths.amax()).square().mean(),)


class Pooled(nn.Module):
    """Windows that reach beyond the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.pool(self.conv(x) - 3).square().mean(),)


class Blocks(nn.Module):
    """A list called `block`: its values are called as its function's variants would be."""

    def __init__(self) -> None:
        super().__init__()
        layer = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)]
        self.block = nn.ModuleList(layer)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.block:
            x = x + block(x) * 2
        return (x.square().mean(),)


class Derived(nn.Module):
    """Weights that are made of parameters: a scale around one, positions, a normalised matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.positions = nn.Embedding(6, 8)
        self.length = nn.Parameter(torch.rand(8, 1))
        self.direction = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x * (1 + self.scale) + self.positions(torch.arange(x.shape[1]))
        matrix = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return ((x @ matrix.t()).square().mean(),)


def test_gradients_of_what_is_made_of_parameters_wait_for_the_step() -> None:
    """Data parallel training moves no activation; every sum is in the step program."""
    model = of(Derived(), {"x": torch.randn(8, 6, 8)})
    cluster = load_cluster("2xcpu")
    decisions = next(iter(data_parallel(model.graph, cluster, 1)))
    pcg = lower(model.graph, decisions)
    assert not any(isinstance(item, Movement) for item in pcg.main.body)
    assert {p.reduce for p in pcg.parameters} == {("data",)}
    assert model.error(decisions)[0] < LIMIT


@pytest.mark.parametrize("seed", range(12))
def test_what_is_made_of_parameters_under_any_plan(seed: int) -> None:
    model = of(Derived(), {"x": torch.randn(8, 6, 8)})
    mesh = grid({"x": 2, "y": 2})
    decisions = random_plan(model.graph, model.factored, mesh, seed)
    error, where = model.error(decisions)
    assert error < LIMIT, where


def test_a_mask_read_by_position_is_split_over_microbatches() -> None:
    """Hugging Face masks are functions of sample and position numbers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 24, "n_positions": 6, "n_embd": 12, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 24, (8, 6))
    mask = (torch.rand(8, 6) < 0.8).long()
    mask[:, 0] = 1
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    model = of(transformers.GPT2LMHeadModel(config).train(), batch)
    decisions = next(iter(data_parallel(model.graph, load_cluster("2xcpu"), 2)))
    error, where = model.error(decisions)
    assert error < LIMIT, where


class Token(nn.Module):
    """A learned token in front of every sample, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        loss: Tensor = self.head(rows).square().sum()
        return loss


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_what_is_repeated_for_every_sample_is_cut_in_time(microbatches: int) -> None:
    model = of(Token(), {"x": torch.randn(8, 3, 6)})
    decisions = next(iter(data_parallel(model.graph, load_cluster("2xcpu"), microbatches)))
    error, where = model.error(decisions)
    assert error < LIMIT, where


def test_a_scalar_parameter_meets_a_whole_loss() -> None:
    """The product of a partial loss and a parameter would give a gradient per rank."""
    model = of(Weighted(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)})
    decisions = next(iter(data_parallel(model.graph, load_cluster("2xcpu"), 1)))
    error, where = model.error(decisions)
    assert error < LIMIT, where


def test_only_sums_are_hoisted() -> None:
    model = of(Lengths(), {"x": torch.randn(8, 4), "lengths": torch.rand(8) + 1})
    cluster = load_cluster("2xcpu")
    error, where = model.error(next(iter(data_parallel(model.graph, cluster, 1))))
    assert error < LIMIT, where
    with pytest.raises(LayoutError, match="is no sum"):
        model.error(next(iter(data_parallel(model.graph, cluster, 2))))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Pooled, Blocks])
def test_random_plans(kind: type[nn.Module], seed: int) -> None:
    batch = {"x": torch.randn(4, 2, 12, 12) if kind is Pooled else torch.randn(4, 4)}
    model = of(kind(), batch)
    plan = random_plan(model.graph, model.factored, grid({"x": 2, "y": 2}), seed)
    error, where = model.error(plan)
    assert error < LIMIT, where
