"""`step(batch, local=True)`, fed by a DistributedSampler: every plan trains as on all samples."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from parloom import runtime as rt
from parloom.comparators.baselines import data_parallel, random_plan
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.execute.program import compile_pcg
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.samples import sample_dims
from parloom.runtime import batches as batches_module
from parloom.runtime import trainer as trainer_module
from tests.dist import lowered
from tests.examples import examples

SIZE = 8
Batch = dict[str, Tensor]


class Weighted(nn.Module):
    """Samples first; a scale of the features that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        out = self.b((self.a(x) * scale).relu())
        loss: Tensor = ((out - y) * out.softmax(-1)).square().mean()
        return loss


class Recurrent(nn.Module):
    """Positions first: samples are in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(8, 4), nn.LSTM(4, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out = self.head(self.layer(self.embed(ids))[0])
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())


class Pairs(nn.Module):
    """Each sample of one input against all of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        scores = self.left(image) @ self.right(text).T
        return F.cross_entropy(scores, torch.arange(SIZE))


class Positions(nn.Module):
    """Attention with a mask over positions that all samples share, and positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(8, 8), nn.Parameter(torch.randn(4, 8))
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.table
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        logits = self.head(x + out).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=0)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 8, shape)


class Plain(nn.Module):
    """Samples first, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.a(x).tanh() - y).square().mean()
        return loss


class Unread(nn.Module):
    """Labels that a data set brings, and the model does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.a(x).tanh().square().mean()
        return loss


BUILDS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "plain": lambda: (Plain(), {"x": torch.randn(SIZE, 4), "y": torch.randn(SIZE, 4)}),
    "unread": lambda: (Unread(), {"labels": ids(SIZE), "x": torch.randn(SIZE, 4)}),
    "weighted": lambda: (
        Weighted(),
        {"x": torch.randn(SIZE, 4), "scale": torch.rand(6), "y": torch.randn(SIZE, 4)},
    ),
    "shared first": lambda: (
        Weighted(),
        {"scale": torch.rand(6), "y": torch.randn(SIZE, 4), "x": torch.randn(SIZE, 4)},
    ),
    "recurrent": lambda: (Recurrent(), {"ids": ids(8, SIZE), "labels": ids(8, SIZE)}),
    "pairs": lambda: (Pairs(), {"image": torch.randn(SIZE, 4), "text": torch.randn(SIZE, 4)}),
    "positions": lambda: (
        Positions(),
        {"ids": ids(SIZE, 4), "mask": torch.randn(4, 4), "labels": ids(SIZE, 4)},
    ),
}
DIMS = {
    "plain": {"x": 0, "y": 0},
    "unread": {"x": 0},
    "weighted": {"x": 0, "y": 0},
    "shared first": {"x": 0, "y": 0},
    "recurrent": {"ids": 1, "labels": 1},
    "pairs": {"image": 0, "text": 0},
    "positions": {"ids": 0, "labels": 0},
}


@cache
def model(name: str) -> lowered.Model:
    torch.manual_seed(0)
    return lowered.of(*BUILDS[name]())


def programs(
    name: str, sizes: dict[str, int], seed: int | None, microbatches: int = 1
) -> rt.Program:
    """Of a random plan, or of data parallelism where there is no seed."""
    held, mesh = model(name), grid(sizes)
    if seed is None:
        cluster = load_cluster(f"{mesh.num_ranks}xcpu")
        plan = next(data_parallel(held.graph, cluster, microbatches))
    else:
        plan = replace(
            random_plan(held.graph, held.factored, mesh, seed), num_microbatches=microbatches
        )
    return compile_pcg(lower(held.graph, plan, factored=held.factored), "test").program


def step(program: rt.Program, name: str) -> tuple[int, float]:
    """A step that a sampler feeds: the number of replicas, and the largest difference on any rank.

    Differences are of the loss and of the weights after SGD, from those of the global batch.
    """
    held, dims = model(name), DIMS[name]
    rate = 0.1

    def body(comm: rt.Comm) -> tuple[int, float]:
        trainer = rt.Trainer(
            program,
            held.tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=rate),
            comm=comm,
            sample_dims=dims,
        )
        replicas, position = trainer.sampler_position
        data: Any = range(SIZE)
        sampler: Any = DistributedSampler(data, replicas, position, shuffle=True, seed=3)
        chosen = torch.tensor(list(sampler))
        batch = {
            n: t.index_select(dims[n], chosen) if n in dims else t for n, t in held.batch.items()
        }
        loss = trainer.step(batch, local=True).loss
        assert trainer.samples_seen == SIZE
        state = trainer.state_dict()
        moved = {n: held.tensors[n] - rate * g for n, g in held.expected.gradients.items()}
        off = [float((state[n] - value).abs().max()) for n, value in moved.items()]
        return replicas, max([*off, float((loss - held.expected.loss).abs())])

    found = rt.run_threads(program.mesh, body)
    return found[0][0], max(off for _, off in found)


@pytest.mark.parametrize("name", BUILDS)
def test_samples_are_found(name: str) -> None:
    assert sample_dims(model(name).factored) == DIMS[name]


@examples(50)
@given(
    name=st.sampled_from(sorted(BUILDS)),
    sizes=st.sampled_from([{"x": 2}, {"x": 2, "y": 2}, {"x": 4}, {"x": 2, "y": 4}]),
    seed=st.none() | st.integers(0, 10_000),
)
def test_a_sampler_feeds_any_plan(name: str, sizes: dict[str, int], seed: int | None) -> None:
    assume(seed is not None or name != "shared first")  # its first input has no samples
    replicas, off = step(programs(name, sizes, seed), name)
    assert SIZE % replicas == 0
    assert off <= 1e-9


@pytest.mark.parametrize("seed", [None, 2, 3])
def test_a_sampler_feeds_microbatches(seed: int | None) -> None:
    program = programs("plain", {"x": 2, "y": 2}, seed, 2)
    replicas, off = step(program, "plain")
    assert off <= 1e-9
    assert seed is not None or replicas == 4


def test_ranks_read_their_own_samples_where_the_inputs_agree() -> None:
    """Data parallelism, and random plans of both kinds: the property above is not an empty one."""
    assert step(programs("weighted", {"x": 4}, None), "weighted")[0] == 4
    counts = {step(programs("positions", {"x": 2}, seed), "positions")[0] for seed in range(12)}
    assert counts == {1, 2}


def test_samples_that_meet_others_labels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above finds a trainer that goes by the first input and takes all as local."""
    program = programs("weighted", {"x": 2, "y": 2}, 0)
    by_name = {spec.name: spec for spec in program.inputs}
    axes = [rt.sharding.axes_of((by_name[name].dims[0],)) for name in ("x", "y")]
    assert axes == [("y",), ("x",)]
    replicas, off = step(program, "weighted")
    assert replicas == 1
    assert off <= 1e-9
    monkeypatch.setattr(batches_module, "sample_axes", lambda program, dims: ("y",))
    monkeypatch.setattr(trainer_module, "local_axes", lambda pipeline, dims: (("y",),))
    monkeypatch.setattr(
        batches_module,
        "local_dims",
        lambda spec, dims, own: (
            tuple(tuple(d for d in digits if isinstance(d, int)) for digits in spec.dims)
            if spec.name in dims
            else spec.dims
        ),
    )
    replicas, off = step(program, "weighted")
    assert replicas == 2
    assert off > 1e-3


def test_what_all_samples_share_is_given_whole() -> None:
    program = programs("weighted", {"x": 4}, None)
    batch = model("weighted").batch

    def body(comm: rt.Comm) -> None:
        trainer = rt.Trainer(
            program, model("weighted").tensors, comm=comm, sample_dims=DIMS["weighted"],
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )  # fmt: skip
        mine = {n: t.chunk(4)[comm.rank] if n != "scale" else t[:3] for n, t in batch.items()}
        trainer.step(mine, local=True)

    with pytest.raises(InputError, match=r"'scale' is .*\[3\].*all samples share it.*whole"):
        rt.run_threads(program.mesh, body)


def test_what_all_samples_share_is_the_same_on_all_ranks() -> None:
    program = programs("weighted", {"x": 4}, None)
    batch = model("weighted").batch

    def body(comm: rt.Comm) -> None:
        trainer = rt.Trainer(
            program, model("weighted").tensors, comm=comm, sample_dims=DIMS["weighted"],
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )  # fmt: skip
        mine = {
            n: t.chunk(4)[comm.rank] if n != "scale" else t + comm.rank for n, t in batch.items()
        }
        trainer.step(mine, local=True)

    with pytest.raises(InputError, match=r"input 'scale' differs between ranks 0 and 1"):
        rt.run_threads(program.mesh, body)


@pytest.mark.parametrize("given", [(SIZE,), (SIZE // 4,), (3, 2), None])
@pytest.mark.parametrize("local", [True, False])
def test_an_entry_that_nothing_reads_may_be_anything(
    given: tuple[int, ...] | None, local: bool
) -> None:
    program = programs("unread", {"x": 4}, None)
    assert program.unread == ("labels",)
    held = model("unread")

    def body(comm: rt.Comm) -> float:
        trainer = rt.Trainer(
            program, held.tensors, comm=comm, sample_dims=DIMS["unread"],
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )  # fmt: skip
        x = held.batch["x"]
        batch = {"x": x.chunk(4)[comm.rank] if local else x}
        if given is not None:  # not even the same on all ranks
            batch["labels"] = torch.full(given, comm.rank)
        with pytest.raises(InputError, match="the batch has"):
            trainer.step({**batch, "other": x}, local=local)
        return float((trainer.step(batch, local=local).loss - held.expected.loss).abs())

    assert max(rt.run_threads(program.mesh, body)) <= 1e-9
