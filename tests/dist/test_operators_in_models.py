"""Operators as models say them: captured, under random plans, equal to one device.

`tests/property` gives every operator hand-written calls; here the arguments are what a trace makes.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom.capture import capture
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg_text import print_pcg
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from tests.capture.models import assert_equal
from tests.dist.lowered import MESHES, of
from tests.equality import TOLERANCE

Built = tuple[nn.Module, dict[str, Tensor]]


class UNet(nn.Module):
    """Convolutions down and up, sampled up in two ways, a skip, padding, norms of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 12, 3, padding="same", groups=3)
        self.up = nn.ConvTranspose2d(12, 6, 4, stride=2, padding=1)
        self.norm, self.own = nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)
        self.out = nn.Conv2d(12, 4, 3)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        first = F.silu(self.norm(self.down(image)))
        deep = self.deep(F.max_pool2d(first, 3, 2, 1))
        wide = F.interpolate(deep, scale_factor=2, mode="bilinear")
        near = F.interpolate(deep, scale_factor=2)
        joined = torch.cat([self.own(self.up(deep)), first * (wide + near)[:, :6]], 1)
        return F.cross_entropy(self.out(F.pad(joined, (1, 1, 1, 1))), labels, ignore_index=3)


def unet() -> Built:
    return UNet(), {"image": torch.rand(4, 3, 12, 12), "labels": torch.randint(0, 4, (4, 12, 12))}


class Recurrent(nn.Module):
    """Two layers both ways, a cell, class weights and smoothing."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True)
        self.cell, self.head = nn.GRUCell(12, 6), nn.Linear(6, 12)
        self.register_buffer("weight", torch.rand(12) + 0.5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        last = self.cell(states[:, -1], states.amax(1)[:, :6])
        logits = self.head(F.normalize(last, dim=-1))
        return F.cross_entropy(logits, labels, weight=self.weight, label_smoothing=0.1)


def recurrent() -> Built:
    return Recurrent(), {"x": torch.rand(6, 4, 6), "labels": torch.randint(0, 12, (6,))}


class Bags(nn.Module):
    """Embedding bags of one length and of several, writes by index, the best of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.EmbeddingBag(12, 6, mode="mean", padding_idx=1)
        self.ragged = nn.EmbeddingBag(12, 6, mode="sum")
        self.slots = nn.Parameter(torch.rand(4, 12))

    def forward(self, rows: Tensor, flat: Tensor, starts: Tensor) -> Tensor:
        both = torch.cat([self.even(rows), self.ragged(flat, starts)], -1)
        best, at = both.max(-1)
        counts = F.one_hot(at, 12).sum(0)
        total = torch.zeros(4, 12).index_add(0, rows[:, 0] % 4, both)
        total[rows[:, 1] % 4] += self.slots[rows[:, 2] % 4]
        picked = self.slots.gather(1, at.unsqueeze(1)).squeeze(1)
        return (best * picked).sum() + (total.tril() * counts).square().mean()


def bags() -> Built:
    batch = {"rows": torch.randint(0, 12, (4, 6)), "flat": torch.randint(0, 12, (20,))}
    return Bags(), batch | {"starts": torch.tensor([0, 3, 3, 15])}


class Waves(nn.Module):
    """Complex rotations, a Fourier transform, noise and stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.angle = nn.Linear(12, 12), nn.Parameter(torch.rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.mix(x).unflatten(-1, (6, 2)))
        turned = turned * torch.polar(torch.ones_like(self.angle), self.angle)
        flat = torch.view_as_real(turned).flatten(-2)
        spectrum = torch.fft.fft(flat, dim=1).real
        kept = torch.empty(x.shape[0], 1, 1).bernoulli_(0.5)
        noisy = flat + 0.1 * torch.randn_like(flat)
        result: Tensor = (noisy * kept + spectrum).std(-1).logsumexp(1).mean()
        return result


def waves() -> Built:
    return Waves(), {"x": torch.rand(6, 4, 12)}


class Pooled(nn.Module):
    """The last token that is no padding, some marked tokens, and the logit of each label."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(12, 6), nn.Linear(6, 12)
        self.classes, self.tags = nn.Linear(12, 6), nn.Linear(12, 4)

    def forward(self, ids: Tensor, marks: Tensor, tags: Tensor, labels: Tensor) -> Tensor:
        h = F.gelu(self.mix(self.tokens(ids)))
        n, length = ids.shape
        last = (torch.arange(length) * (ids != 0)).argmax(-1)
        pooled = h[torch.arange(n), last]
        logits = self.tags(h[torch.arange(n).unsqueeze(1), marks]).log_softmax(-1)
        rows, columns = torch.meshgrid(torch.arange(n), torch.arange(2), indexing="ij")
        chosen = logits[rows, columns, tags]
        marked = h.clone()
        marked[torch.arange(n), last] = 2.0 * pooled
        pooled = pooled + marked.mean(1)
        loss: Tensor = F.cross_entropy(self.classes(pooled), labels) - chosen.mean()
        return loss


def pooled() -> Built:
    batch = {"ids": torch.randint(0, 12, (12, 4)), "marks": torch.randint(-4, 4, (12, 2))}
    return Pooled(), batch | {
        "tags": torch.randint(0, 4, (12, 2)), "labels": torch.randint(0, 6, (12,))
    }  # fmt: skip


class Attention(nn.Module):
    """Torch's attention with padding and dropout: products are added to a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        out: Tensor = self.attend(x, x, x, key_padding_mask=pad)[0]
        return out.square().mean()


def attention() -> Built:
    pad = torch.zeros(12, 6, dtype=torch.bool)
    pad[3:7, 4:] = True
    return Attention(), {"x": torch.rand(12, 6, 12), "pad": pad}


class Images(nn.Module):
    """Features of images in place of some tokens, as models of text and images have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.patches = nn.Embedding(12, 12), nn.Linear(6, 12)
        self.mix, self.head = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, ids: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        h, features = self.tokens(ids), self.patches(image).flatten(0, 1)
        mask = (ids == 1).unsqueeze(-1).expand_as(h)
        h = h.masked_scatter(mask, features)
        again = h.clone()
        again[ids == 1] = features.tanh()
        logits = self.head(F.gelu(self.mix(h + again)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def images() -> Built:
    ids = torch.randint(2, 12, (12, 6))
    for row in range(12):  # two places in each, though that is not asked for
        ids[row, torch.randperm(6)[:2]] = 1
    labels = torch.randint(0, 12, (12, 6))
    return Images(), {"ids": ids, "image": torch.rand(12, 2, 6), "labels": labels}


class Strided(nn.Module):
    """Memory read and written by stride: of weights, which lie side by side, and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.rand(12, 4))
        self.second = nn.Parameter(torch.rand(12, 4))
        self.head = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.second.as_strided((12, 4), (2, 1), 3) + self.first)
        diagonal = torch.as_strided_scatter(h.contiguous(), h[:6, 0], (6,), (13,), 1)
        loss: Tensor = self.head(diagonal[:, :4]).square().mean()
        return loss


def strided() -> Built:
    return Strided(), {"x": torch.rand(12, 4)}


MODELS: dict[str, Callable[[], Built]] = {
    "unet": unet, "recurrent": recurrent, "bags": bags, "waves": waves,
    "pooled": pooled, "images": images,
    "attention": attention, "strided": strided,
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_a_model_are_equal(name: str) -> None:
    torch.manual_seed(0)
    model = of(*MODELS[name]())
    for mesh in MESHES.values():
        for seed in range(5):
            error, where = model.error(random_plan(model.graph, model.factored, mesh, seed))
            assert error <= TOLERANCE, (where, mesh, seed)


def test_an_infinite_addend_counts_once() -> None:
    """Heads that do not divide are split inside, so that scores are partial sums."""
    torch.manual_seed(0)
    model = of(*attention())
    for plan in METHODS["megatron"](model.graph, load_cluster("4xcpu"), 1, 0):
        error, where = model.error(plan)
        assert error <= TOLERANCE, where
    pcg = print_pcg(lower(model.graph, plan))
    assert "partial(tensor) = baddbmm(" in pcg


def test_rows_looked_up_by_sample_stay_with_their_samples() -> None:
    model, batch = pooled()
    graph = capture(model, batch)
    assert_equal(graph, model, batch)
    ops = [node.op for _, node in graph.unfolded()]
    assert ops.count("parloom.index_each") == 3
    assert ops.count("parloom.put_each") == 1
    assert not {"index", "index_put"} & set(ops)
    plan = next(METHODS["data_parallel"](graph, load_cluster("4xcpu"), 1, 0))
    assert {"parloom.index_each"} <= {node.key.split(":")[1].split("#")[0] for node in plan.nodes}
    assert " combine " not in print_pcg(lower(graph, plan))


class Choices(nn.Module):
    """Classes that a mask leaves; some samples have none, and no label either."""

    def __init__(self, smoothing: float, weighted: bool) -> None:
        super().__init__()
        self.head, self.smoothing = nn.Linear(6, 12), smoothing
        self.weight = nn.Buffer(torch.rand(12) + 0.5) if weighted else None

    def forward(self, x: Tensor, closed: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).masked_fill(closed, float("-inf"))
        return F.cross_entropy(logits, labels, self.weight, label_smoothing=self.smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["", "smoothed"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("axes", ["x", "y", "xy"])
def test_what_is_ignored_counts_nothing_though_it_is_infinite(
    axes: str, weighted: bool, smoothing: float
) -> None:
    """With the classes over all ranks, or over some and the samples over the others."""
    torch.manual_seed(0)
    closed, labels = torch.zeros(12, 12, dtype=torch.bool), torch.arange(12)
    closed[[2, 3, 7]], labels[[2, 3, 7]] = True, -100
    batch = {"x": torch.rand(12, 6), "closed": closed, "labels": labels}
    model = of(Choices(smoothing, weighted), batch)
    split = {"c": tuple(axes)} | ({} if axes == "xy" else {"n": ("y" if axes == "x" else "x",)})
    (node,) = [n for _, n in model.graph.unfolded() if n.op == "cross_entropy_loss"]
    plan = Decisions(
        one_stage(grid({"x": 2, "y": 2})), (NodeDecision(node.key, tuple(split.items())),)
    )
    error, where = model.error(plan)
    assert error <= TOLERANCE, where
