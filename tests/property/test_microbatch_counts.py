"""A count of microbatches is listed where lowering with it succeeds, and nowhere else."""

import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.errors import InputError, LayoutError
from parloom.ir.factors import Factored, factorize
from parloom.ir.lower import lower
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.microbatches import divisors
from parloom.ir.plan import GLOBAL, MICROBATCH, Decisions
from parloom.ir.samples import sample_dims
from tests.dist.lowered import small_graph


class Groups(nn.Module):
    """Samples in groups of `size`, compared within each; over all of them where `joined`."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.size, self.joined = size, kind == "joined"
        norm = nn.BatchNorm1d(4) if kind == "norm" else nn.Tanh()
        self.layer = nn.Sequential(nn.Linear(4, 4), norm)
        self.table = nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x + self.table(torch.zeros(len(x), dtype=torch.long)))
        groups = x.view(-1, self.size, 4)
        shared = groups.mean(1, keepdim=True)
        if self.joined:
            shared = shared.softmax(0)
        return ((groups - shared) * torch.ones_like(x).view_as(groups)).square().sum()


def groups(number: int, size: int, kind: str) -> Factored:
    return factorize(capture(Groups(size, kind), {"x": torch.randn(number * size, 4)}))


def lowered(factored: Factored, samples: int) -> tuple[int, ...]:
    """The divisors of `samples` with which lowering succeeds."""
    found = []
    for count in divisors(samples):
        try:
            lower(factored.graph, Decisions(num_microbatches=count), factored=factored)
        except LayoutError:
            continue
        found.append(count)
    return tuple(found)


@pytest.mark.sample(11)
@pytest.mark.parametrize("kind", ["", "joined", "norm"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("number", [2, 4, 6])
def test_the_legal_counts_are_those_that_can_be_lowered(number: int, size: int, kind: str) -> None:
    factored = groups(number, size, kind)
    legal = legal_microbatches(factored)
    assert legal.samples == number * size
    assert legal.counts == lowered(factored, number * size)
    assert legal.counts == ((1,) if kind else divisors(number))
    assert legal_microbatches(factored, MICROBATCH).counts == divisors(number * size)
    assert bool(legal.reason) == (legal.counts != divisors(number * size))


def test_one_sample_is_one_microbatch() -> None:
    assert legal_microbatches(groups(1, 1, "")).counts == (1,)


@pytest.mark.parametrize("name", ["gpt", "cnn", "dlrm", "gnmt", "gshard", "dit_xl"])
def test_the_legal_counts_of_models(name: str) -> None:
    factored = factorize(small_graph(name))
    legal = legal_microbatches(factored)
    assert legal.counts == lowered(factored, 4)
    assert legal.counts == ((1,) if name == "cnn" else (1, 2, 4))


def test_an_illegal_count_says_which_operator_forbids_it() -> None:
    legal = legal_microbatches(factorize(small_graph("cnn")))
    with pytest.raises(InputError, match=r"norm:batch_norm#0 \(cnn.py:43\).*--batch-semantics"):
        legal.check(2)
    with pytest.raises(InputError, match=r"counts: 1; with --batch-semantics microbatch .*: 2, 4$"):
        legal.check(3)
    legal = legal_microbatches(groups(3, 4, ""))
    with pytest.raises(
        InputError, match=r"12 samples do not divide into 5 .* counts: 3; with .*: 4, 6$"
    ):
        legal.check(5)
    with pytest.raises(InputError, match=r"groups of them that 2 .* counts: 1, 3$"):
        legal.check(2)


class Volumes(nn.Module):
    """A segmentation of volumes; every dim but that of channels may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layer(x).relu()), y)


@pytest.mark.parametrize("samples", [1, 6])
def test_a_batch_of_one_sample_has_no_microbatches(samples: int) -> None:
    x = torch.randn(samples, 2, 4, 6, 6)
    y = torch.zeros(samples, 4, 6, 6, dtype=torch.long)
    factored = factorize(capture(Volumes(), {"x": x, "y": y}))
    dims = sample_dims(factored)
    assert dims == ({} if samples == 1 else {"x": 0, "y": 0})
    for semantics in (GLOBAL, MICROBATCH):
        legal = legal_microbatches(factored, semantics)
        assert legal.samples == samples
        assert legal.counts == divisors(samples)
