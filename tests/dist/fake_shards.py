"""Ranks that hold shards, without a trainer, for the tests of checkpoints and weights."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parloom.execute.box_planner import BoxLoadPlanner, BoxSavePlanner, by_name
from parloom.execute.manifest import read_manifest
from parloom.execute.safetensors_storage import BoxReader, BoxWriter


@dataclass(frozen=True)
class FakeBox:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[slice, ...]


@dataclass(frozen=True)
class FakeShard:
    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[FakeBox, ...]
    tensor: Tensor
    primary: bool = True


@dataclass
class FakeTrainer:
    held: list[FakeShard]
    state: dict[str, Any] = field(default_factory=lambda: {"step": 1})
    refreshed: bool = False

    def shards(self) -> Iterator[FakeShard]:
        yield from self.held

    def extra_state(self) -> dict[str, Any]:
        return self.state

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)

    def refresh(self) -> None:
        self.refreshed = True


@dataclass(frozen=True)
class Layout:
    """Digits per dim (int: local size, str: axis) and ceil-chunks of dim 0 of `storage` axes."""

    mesh: tuple[tuple[str, int], ...]
    dims: tuple[tuple[int | str, ...], ...]
    storage: tuple[str, ...] = ()
    chunked: int = 0

    @property
    def num_ranks(self) -> int:
        return prod(size for _, size in self.mesh)

    def coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self.mesh):
            rank, found[name] = divmod(rank, size)
        return found

    def rows(self, rank: int) -> list[list[int]]:
        """For every dim, the global indices that the rank holds, in local order."""
        at, sizes = self.coordinates(rank), dict(self.mesh)
        rows = []
        for digits in self.dims:
            shape = [d if isinstance(d, int) else sizes[d] for d in digits]
            index = tuple(slice(None) if isinstance(d, int) else at[d] for d in digits)
            rows.append(torch.arange(prod(shape)).reshape(shape)[index].flatten().tolist())
        if self.storage:
            chunk, parts = 0, 1
            for axis in self.storage:
                chunk, parts = chunk * sizes[axis] + at[axis], parts * sizes[axis]
            held = rows[self.chunked]
            size = -(-len(held) // parts)
            rows[self.chunked] = held[chunk * size : (chunk + 1) * size]
        return rows

    def shard(self, name: str, full: Tensor, rank: int) -> FakeShard:
        rows = self.rows(rank)
        local = full.clone()
        for dim, held in enumerate(rows):
            local = local.index_select(dim, torch.tensor(held, dtype=torch.int64))
        boxes = tuple(
            FakeBox(
                tuple(start for start, _, _ in runs),
                tuple(size for _, size, _ in runs),
                tuple(slice(at, at + size) for _, size, at in runs),
            )
            for runs in itertools.product(*map(_runs, rows))
        )
        used = {d for digits in self.dims for d in digits} | set(self.storage)
        primary = all(at == 0 for axis, at in self.coordinates(rank).items() if axis not in used)
        return FakeShard(name, tuple(full.shape), boxes, local, primary)


def _runs(rows: list[int]) -> list[tuple[int, int, int]]:
    """Maximal runs of consecutive indices as (global start, size, local start)."""
    runs: list[tuple[int, int, int]] = []
    for at, row in enumerate(rows):
        if runs and row == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((row, 1, at))
    return runs


def one(full: Tensor, name: str = "w") -> FakeShard:
    """The whole tensor on one rank."""
    return Layout((), tuple((n,) for n in full.shape)).shard(name, full, 0)


# --- what torch.distributed.checkpoint does, for many ranks in one process ---------------------


def simulated_save(trainers: Sequence[FakeTrainer], folder: Path) -> None:
    writers = [BoxWriter(folder, 1, t.state) for t in trainers]
    planners = [BoxSavePlanner() for _ in trainers]
    plans = []
    for rank, (trainer, planner, writer) in enumerate(
        zip(trainers, planners, writers, strict=True)
    ):
        planner.set_up_planner(by_name(trainer.shards()), None, rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        w.write_data(p.finish_plan(plan), p).value()
        for w, p, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)


def simulated_load(trainers: Sequence[FakeTrainer], folder: Path) -> None:
    manifest = read_manifest(folder)
    readers = [BoxReader(folder, manifest) for _ in trainers]
    planners = [BoxLoadPlanner() for _ in trainers]
    plans = []
    for trainer, planner, reader in zip(trainers, planners, readers, strict=True):
        metadata = reader.read_metadata()
        planner.set_up_planner(by_name(trainer.shards()), metadata)
        reader.set_up_storage_reader(metadata, False)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for trainer, planner, reader, plan in zip(trainers, planners, readers, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner)
        trainer.load_extra_state(dict(manifest.state))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    mesh = tuple(
        (name, draw(st.sampled_from((1, 2, 3)))) for name in "xyz"[: draw(st.integers(0, 3))]
    )
    dims: list[list[int | str]] = [[n] for n in shape]
    free = []
    for name, size in mesh:
        places = [
            (d, i)
            for d, digits in enumerate(dims)
            for i, n in enumerate(digits)
            if isinstance(n, int) and n % size == 0 and n
        ]
        use = draw(st.sampled_from(("shard", "store", "replicate")))
        if use == "shard" and places:
            d, i = draw(st.sampled_from(places))
            rest = int(dims[d][i]) // size
            outer = draw(st.sampled_from([k for k in range(1, rest + 1) if rest % k == 0]))
            dims[d][i : i + 1] = [outer, name, rest // outer]
        elif use == "store":
            free.append(name)
    storage = tuple(draw(st.permutations(free))) if shape else ()
    chunked = draw(st.integers(0, len(shape) - 1)) if shape else 0
    return Layout(mesh, tuple(tuple(d) for d in dims), storage, chunked)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))
