"""Microbatches equal the global batch, and values that are expanded over it are cut in time."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import LayoutError
from parloom.execute.verify import reference_trace
from parloom.ir.graph import Call, Node, Ref
from parloom.ir.lower import lower
from parloom.ir.lower_body import Body
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG, TIME, Compute, Movement
from parloom.ir.plan import ActivationDecision, Decisions, one_stage
from tests.dist import staged
from tests.dist.lowered import Built, Model, of
from tests.equality import TOLERANCE

torch.set_num_threads(1)
SAMPLES, SEQ, WIDTH, HEADS = 8, 6, 8, 2


def hidden() -> Tensor:
    return torch.randn(SAMPLES, SEQ, WIDTH)


class Positions(nn.Module):
    """Learned positions looked up by numbers that are expanded over the batch, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SEQ, WIDTH)
        self.kinds = nn.Embedding(2, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(SEQ).unsqueeze(0).expand(x.shape[0], -1)
        x = x + self.table(at) + self.kinds(torch.zeros_like(at))
        return F.dropout(self.head(x), 0.3).square().sum()


class Bias(nn.Module):
    """A learned bias of heads that is made a tensor of the batch, as in T5, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * SEQ, HEADS)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(SEQ)
        bias = self.bias(at[:, None] - at[None, :] + SEQ).permute(2, 0, 1).unsqueeze(0)
        mask = torch.ones(x.shape[0], 1, SEQ, SEQ, dtype=torch.bool).tril()
        bias = bias.expand(x.shape[0], -1, -1, -1).clone().masked_fill(~mask, -1e9)
        q, k, v = (
            t.view(x.shape[0], SEQ, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return made.square().sum()


class Repeated(nn.Module):
    """Class and mask tokens that are repeated, and a state of zeros, as in ViT, MAE and LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.mask = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        x = torch.cat([self.token.repeat(size, 1, 1), x, self.mask.repeat(size, 2, 1)], 1)
        state = x.new_zeros(size, WIDTH)
        for row in x.unbind(1):
            state = torch.tanh(self.mix(torch.cat([row, state], -1)))
        return state.square().sum()


class Drawn(nn.Module):
    """Draws of the batch's size that no sample goes into, as stochastic depth has them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], 1, 1, dtype=x.dtype).add(0.7).floor()
        made: Tensor = x + self.head(x) * keep / 0.7
        return made.square().sum()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "positions": Positions, "bias": Bias, "repeated": Repeated, "drawn": Drawn
}  # fmt: skip


@cache
def model(name: str) -> Model:
    torch.manual_seed(0)
    return of(BUILDERS[name](), {"x": hidden()})


def moved_over_time(pcg: PCG) -> list[str]:
    """Values that are made for all microbatches, and cut afterwards."""
    return [
        item.operand.name
        for function in (pcg.main, *pcg.functions)
        for item in function.body
        if isinstance(item, Movement) and TIME in item.step.axes
    ]


@pytest.mark.parametrize(("method", "count"), [("data_parallel", 4), ("fsdp", 2), ("megatron", 2)])
@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_expanded_over_the_batch_is_cut_in_time(name: str, method: str, count: int) -> None:
    found = model(name)
    for decisions in METHODS[method](found.graph, load_cluster("2xcpu"), count, 0):
        assert not moved_over_time(lower(found.graph, decisions))
        error, where = found.error(decisions)
        assert error <= TOLERANCE, where


@pytest.mark.parametrize("name", BUILDERS)
def test_the_test_sees_what_is_not_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = model(name)
    decisions = next(METHODS["data_parallel"](found.graph, load_cluster("2xcpu"), 2, 0))
    monkeypatch.setattr("parloom.ir.lower.expanded", lambda *given: {})
    assert moved_over_time(lower(found.graph, decisions))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BUILDERS)
def test_a_random_plan_with_microbatches_equals_one_device(name: str, seed: int) -> None:
    found = model(name)
    decisions = random_plan(found.graph, found.factored, grid({"x": 2, "y": 2}), seed, 2)
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where


class Penalty(nn.Module):
    """A loss to which is added what no sample goes into: penalties of weights with factors and
    signs of their own, numbers, and zeros that losses of layers are added to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        aside = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x = layer(x).tanh()
            aside = aside + x.mean((1, 2)).square().mean()
        total = x.sum((0, 1)) - self.offset.square()  # of any shape, less what is whole
        norm = sum(p.square().sum() for p in self.layers.parameters())
        aside = aside + torch.tensor(7) + (self.offset > 0).sum()
        aside = aside + (self.offset > 0).any()
        loss = torch.add(0.5 * x.square().mean() + 3.0, aside, alpha=0.1)
        return (
            1e-3 * norm
            + (2 - loss)
            - 0.01 * total.sum()
            - torch.sub(self.offset.sum(), loss, alpha=2)
        )


@cache
def penalty(samples: int = SAMPLES) -> Model:
    torch.manual_seed(0)
    return of(Penalty(), {"x": torch.randn(samples, SEQ, WIDTH)})


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_is_added_to_a_sum_of_microbatches_counts_once(count: int, devices: int) -> None:
    found = penalty()
    for seed in range(3):
        decisions = random_plan(found.graph, found.factored, grid({"x": devices}), seed, count)
        error, where = found.error(decisions)
        assert error <= TOLERANCE, where


def test_shares_that_no_float_is_exact_for() -> None:
    """Integers are no float32 on their way."""
    error, where = penalty(6).error(Decisions(num_microbatches=3))
    assert error <= TOLERANCE, where


class Draws(nn.Module):
    """Sums over samples of draws, to which something is added, and which other values wait for."""

    def __init__(self, dropped: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropped = dropped

    def forward(self, x: Tensor) -> Tensor:
        if self.dropped:
            x = F.dropout(x, 0.3)
            made: Tensor = self.b(self.a(x)).square().mean() / (x.sum() + 1.0)
            return made
        keep = torch.rand(x.shape[0], 1, 1, dtype=x.dtype)
        y = self.b(self.a(x).tanh())
        total: Tensor = (y * keep).square().mean() + (keep.sum() + 1.0) * self.b.weight.sum()
        return total


@pytest.mark.parametrize("dropped", [False, True])
def test_what_crosses_between_stages_is_as_readers_take_it(dropped: bool) -> None:
    """Or refused: a stage alone does not know that a draw depends on no parameter."""
    torch.manual_seed(0)
    found = of(Draws(dropped), {"x": hidden()})
    expected = reference_trace(found.graph, staged.PLANNED, found.tensors, found.batch)
    refused: list[str] = []
    for seed in range(40):
        stages = staged.randomly_cut(found.graph, 3, random.Random(seed))
        if len(stages) < 2:
            continue
        try:
            sizes = [1] * len(stages)
            plan = staged.drawn(found.graph, stages, sizes, num_microbatches=4, seed=seed)
            report = staged.report(found, plan, expected)
        except LayoutError as error:
            refused.append(str(error))
            continue
        assert report.passed, str(report)
    assert len(refused) < 40
    assert not dropped or any("reads it into one stage" in line for line in refused), refused


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_it_counts_once_in_pipelines(schedule: str) -> None:
    found = penalty()
    expected = reference_trace(found.graph, staged.PLANNED, found.tensors, found.batch)
    for seed in range(4):
        stages = staged.randomly_cut(found.graph, 3, random.Random(seed))
        if len(stages) < 2:
            continue
        sizes = [1, 2, 2][: len(stages)]
        plan = staged.drawn(
            found.graph, stages, sizes, schedule=schedule, num_microbatches=4, seed=seed
        )
        report = staged.report(found, plan, expected)
        assert report.passed, str(report)


def test_the_test_sees_what_counts_for_each_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every microbatch adds all of it, the loss is another; where it is not shared, there is
    no such program.
    """
    found = penalty()
    decisions = Decisions(num_microbatches=2)
    assert found.error(decisions)[0] <= TOLERANCE
    whole = Body.share

    def unshared(self: Body, node: Node, arg: Ref) -> Ref:
        made = whole(self, node, arg)
        item = self.items.pop()
        assert isinstance(item, Compute)
        operand, _ = item.node.args
        self.items.append(replace(item, node=replace(item.node, args=(operand, 1.0))))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Body, "share", unshared)
        assert found.error(decisions)[0] > 1e-3
    monkeypatch.setattr(Body, "in_shares", lambda self, node: node)
    with pytest.raises(LayoutError, match="is needed as a sum over all samples"):
        lower(found.graph, decisions)


class Sequences(nn.Module):
    """Positions first, and a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)  # [positions, samples, width]
        scores = torch.einsum("qbc,kbc->bqk", x, x).masked_fill(~mask, -1e9)
        made: Tensor = torch.einsum("bqk,kbc->qbc", scores.softmax(-1), x)
        return made.square().sum()


def sequences() -> Built:
    torch.manual_seed(0)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    return Sequences(), {"ids": torch.randint(0, 12, (SEQ, SAMPLES)), "mask": mask}


@pytest.mark.parametrize("count", [2, 8])
def test_samples_lie_in_any_dim_and_a_shared_input_is_whole(count: int) -> None:
    found = of(*sequences())
    error, where = found.error(Decisions(one_stage(grid({"x": 1})), num_microbatches=count))
    assert error <= TOLERANCE, where


def test_a_count_that_does_not_divide_names_those_that_do() -> None:
    found = model("positions")
    decisions = next(METHODS["data_parallel"](found.graph, load_cluster("2xcpu"), 1, 0))
    told = (
        r"the 8 samples of input 'x' \(dim 0\) do not divide into 3 microbatches x 2 data-parallel"
    )
    with pytest.raises(
        LayoutError, match=told + r".*nearest legal counts: 2, 4 \(4 samples per rank"
    ):
        lower(found.graph, replace(decisions, num_microbatches=3))


class Dropping(nn.Module):
    """Blocks with dropout of activations and of attention."""

    def __init__(self) -> None:
        super().__init__()
        kwargs = {"dim_feedforward": 12, "dropout": 0.3, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, **kwargs)  # type: ignore[arg-type]
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def dropping(count: int) -> tuple[Model, Decisions]:
    torch.manual_seed(0)
    found = of(Dropping(), {"x": hidden()})
    calls = [i.prefix for i in found.graph.main.body if isinstance(i, Call)]
    assert len(calls) == 2
    plan = random_plan(found.graph, found.factored, grid({"x": 2}), 1, count)
    recomputed = tuple(ActivationDecision(prefix, "recompute") for prefix in calls)
    return found, replace(plan, activations=recomputed)


@pytest.mark.parametrize("count", [2, 4])
def test_recomputed_microbatches_drop_what_the_whole_batch_drops(count: int) -> None:
    found, decisions = dropping(count)
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where


def test_the_test_sees_masks_that_are_not_of_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where every microbatch drew the first one's."""
    found, decisions = dropping(2)
    monkeypatch.setattr(
        "parloom.runtime.random.take",
        lambda whole, dims, mesh, at: rt.take(whole, dims, mesh, {**at, TIME: 0}),
    )
    assert found.error(decisions)[0] > 1e-3


class Counted(nn.Module):
    """A loss that is divided by the number of labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def counted() -> Model:
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (SAMPLES, SEQ))
    labels[: SAMPLES // 2, 1:] = -100
    return of(Counted(), {"x": hidden(), "labels": labels})


@pytest.mark.parametrize(("seed", "count"), [(0, 2), (1, 4), (2, 2), (3, 4)])
def test_inputs_are_cut_in_time_wherever_ranks_cut_them(seed: int, count: int) -> None:
    """Ranks may share out samples, or positions, or both in one."""
    found = counted()
    decisions = random_plan(found.graph, found.factored, grid({"x": 2}), seed, count)
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where


def test_counts_of_labels_are_those_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted()
    decisions = next(METHODS["data_parallel"](found.graph, load_cluster("2xcpu"), 2, 0))
    error, where = found.error(decisions)
    assert error <= TOLERANCE, where

    def of_the_last(program: rt.Program, ctx: rt.Context, batches: Any) -> tuple[Tensor, ...]:
        """What each microbatch has, were it not summed: here twice that of the last."""
        ctx.microbatch = 1
        assert program.prologue is not None
        return tuple(2 * value for value in program.prologue(ctx, batches.microbatch(1)))

    monkeypatch.setattr("parloom.runtime.passes.hoist", of_the_last)
    assert found.error(decisions)[0] > 1e-3
