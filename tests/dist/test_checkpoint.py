"""Checkpoints: any layout into any other, nothing executed, nothing half-written."""

import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from parloom.errors import InputError, LaunchError, VerifyError
from parloom.execute import checkpoint, safetensors_storage, weights
from parloom.execute.box_planner import BoxLoadPlanner, BoxSavePlanner, by_name
from parloom.execute.manifest import (
    MANIFEST,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    tiling_problem,
)
from parloom.execute.safetensors_storage import BoxReader, BoxWriter

# --- ranks that hold shards, without a trainer ------------------------------------------------


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

    def shards(self) -> Iterator[FakeShard]:
        yield from self.held

    def extra_state(self) -> dict[str, Any]:
        return self.state

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.state = state


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


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@given(data=st.data())
@settings(max_examples=60)
def test_any_layout_loads_into_any_other(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = st.sampled_from((0, 1, 2, 3, 5, 6, 12))
    shapes = data.draw(st.lists(st.lists(sizes, max_size=3).map(tuple), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES))
    names = ("wte.weight", "h.0.attn.bias", "step")
    whole = {
        name: torch.randint(0, 100, shape).to(dtype)
        for name, shape in zip(names, shapes, strict=False)
    }

    def trainers(blank: bool) -> list[FakeTrainer]:
        plan = {name: data.draw(layouts(tuple(full.shape))) for name, full in whole.items()}
        # Tensors of one plan share its ranks: the smaller meshes are replicated.
        num_ranks = max(layout.num_ranks for layout in plan.values())
        ranks = [FakeTrainer([]) for _ in range(num_ranks)]
        for name, layout in plan.items():
            for rank, trainer in enumerate(ranks):
                full = torch.zeros_like(whole[name]) if blank else whole[name]
                if rank < layout.num_ranks:
                    trainer.held.append(layout.shard(name, full, rank))
        return ranks

    folder = tmp_path_factory.mktemp("run") / "step-1"
    saved, loaded = trainers(blank=False), trainers(blank=True)
    simulated_save(saved, folder)
    assert [p.name for p in folder.parent.iterdir()] == ["step-1"]
    simulated_load(loaded, folder)
    for trainer in loaded:
        for shard in trainer.held:
            for box in shard.boxes:
                stored = whole[shard.name][
                    tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                ]
                assert torch.equal(shard.tensor[box.local], stored)
    shutil.rmtree(folder.parent)


def test_padding_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    def padded(values: Tensor) -> FakeShard:
        tensor = torch.cat([values, torch.full((1,), -1.0)])
        return FakeShard("w", (3,), (FakeBox((0,), (3,), (slice(0, 3),)),), tensor)

    checkpoint.save(FakeTrainer([padded(torch.arange(3.0))]), tmp_path / "a")
    target = FakeTrainer([padded(torch.zeros(3))])
    checkpoint.load(target, tmp_path / "a")
    assert target.held[0].tensor.tolist() == [0.0, 1.0, 2.0, -1.0]


def test_only_overlapping_boxes_are_read(tmp_path: Path) -> None:
    full = torch.arange(64.0).reshape(8, 8)
    columns = Layout((("x", 4),), ((8,), ("x", 2)))
    simulated_save([FakeTrainer([columns.shard("w", full, r)]) for r in range(4)], tmp_path / "a")
    manifest = read_manifest(tmp_path / "a")
    planner = BoxLoadPlanner()
    rows = Layout((("x", 2), ("y", 2)), (("x", 4), ("y", 4)))
    planner.set_up_planner(
        {"w": rows.shard("w", full, 3)}, BoxReader(tmp_path / "a", manifest).read_metadata()
    )
    items = planner.create_local_plan().items
    assert {item.storage_index.offset for item in items} == {(0, 4), (0, 6)}
    assert [tuple(item.lengths) for item in items] == [(4, 2), (4, 2)]
    assert [tuple(item.storage_offsets) for item in items] == [(4, 0), (4, 0)]


def test_extra_state_comes_back_exactly(tmp_path: Path) -> None:
    state = {
        "step": 7,
        "seed": 2**64 - 1,
        "groups": [{"lr": 0.1 + 0.2, "betas": [0.9, 0.95], "name": 'a "digest": "" b'}],
        "schedule": {"last_lr": [5e-324, 1.7976931348623157e308, -0.0], "milestones": None},
        "unicode": "w\u00e4hlen \u2603",
    }
    checkpoint.save(FakeTrainer([], state), tmp_path / "a")
    target = FakeTrainer([])
    checkpoint.load(target, tmp_path / "a")
    assert target.state == state
    assert json.dumps(target.state) == json.dumps(state)


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_floats_of_the_extra_state_are_exact(value: float) -> None:
    manifest = Manifest(save_id="0" * 32, step=0, files=(), tensors={}, state={"lr": value})
    found = decode_manifest(encode_manifest(manifest), Path("m")).state["lr"]
    assert isinstance(found, float)
    assert found.hex() == value.hex()


@pytest.mark.parametrize("value", [float("nan"), torch.zeros(1), {1, 2}, b"raw"])
def test_extra_state_that_is_not_json_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not JSON"):
        checkpoint.save(FakeTrainer([], {"step": 0, "x": value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- refusals ---------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


def plant(folder: Path, exploded: Path) -> None:
    bomb = pickle.dumps(Bomb(exploded))
    for name in (".metadata", "data.pt", "rank0.distcp", "__0_0.distcp", "model.bin", "x.pkl"):
        (folder / name).write_bytes(bomb)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "step-1"
    full = torch.arange(12.0).reshape(3, 4)
    layout = Layout((("x", 2),), ((3,), ("x", 2)))
    simulated_save([FakeTrainer([layout.shard("w", full, r)]) for r in range(2)], folder)
    return folder


def blank() -> FakeTrainer:
    return FakeTrainer([one(torch.zeros(3, 4))])


def test_planted_pickles_are_not_opened(saved: Path, tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    plant(saved, exploded)
    target = blank()
    checkpoint.load(target, saved)
    assert checkpoint.latest(saved.parent) == saved
    assert target.held[0].tensor.flatten().tolist() == [float(i) for i in range(12)]
    assert not exploded.exists()
    pickle.loads((saved / ".metadata").read_bytes())
    assert exploded.exists(), "the planted file does explode where it is unpickled"


def test_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    exploded, folder = tmp_path / "exploded", tmp_path / "step-1"
    folder.mkdir()
    plant(folder, exploded)
    with pytest.raises(InputError, match="unpickling runs code"):
        checkpoint.load(blank(), folder)
    assert checkpoint.latest(tmp_path) is None
    assert not exploded.exists()


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000-of-00002.safetensors"])
def test_pickle_in_the_place_of_a_file_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    size = (saved / name).stat().st_size
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    (saved / name).write_bytes(bomb + b"\0" * (size - len(bomb)))
    with pytest.raises(InputError, match=name):
        checkpoint.load(blank(), saved)
    assert not exploded.exists()


def test_truncated_manifest_is_refused(saved: Path) -> None:
    raw = (saved / MANIFEST).read_bytes()
    for end in (0, 1, 10, len(raw) // 2, len(raw) - 3):
        (saved / MANIFEST).write_bytes(raw[:end])
        with pytest.raises(InputError, match=r"checkpoint\.json.*restore the folder"):
            checkpoint.load(blank(), saved)
    with pytest.raises(InputError, match=r"checkpoint\.json"):
        checkpoint.latest(saved.parent)


def test_any_changed_byte_of_the_manifest_is_refused(saved: Path) -> None:
    raw = (saved / MANIFEST).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, len(raw), (200,), generator=generator).tolist():
        changed = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        (saved / MANIFEST).write_bytes(changed)
        with pytest.raises(InputError):
            read_manifest(saved)


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest as somebody would who knows about the digest."""
    document = json.loads((folder / MANIFEST).read_text())
    edit(document)
    document["digest"] = ""
    body = json.dumps(document).encode()
    digest = hashlib.sha256(body).hexdigest()
    (folder / MANIFEST).write_bytes(
        body.replace(b'"digest": ""', b'"digest": "%s"' % digest.encode(), 1)
    )


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown key": (lambda d: d.update(pickle="x"), "Extra inputs"),
    "unknown key in a box": (lambda d: d["tensors"]["w"]["boxes"][0].update(a=1), "Extra inputs"),
    "another format": (lambda d: d.update(format="x"), r"parloom\.checkpoint"),
    "later version": (lambda d: d.update(version=2), "version"),
    "no tensors": (lambda d: d.pop("tensors"), "tensors: Field required"),
    "unknown dtype": (lambda d: d["tensors"]["w"].update(dtype="object"), "unknown dtype 'object'"),
    "dtype of torch": (lambda d: d["tensors"]["w"].update(dtype="save"), "unknown dtype"),
    "another dtype": (lambda d: d["tensors"]["w"].update(dtype="float64"), "F32.*says.*F64"),
    "another shape": (lambda d: d["tensors"]["w"].update(shape=[3, 5]), "hold 12 .* has 15"),
    "negative": (lambda d: d["tensors"]["w"]["boxes"][0].update(offsets=[-1, 0]), "greater than"),
    "text": (lambda d: d["tensors"]["w"].update(shape=["3", 4]), "valid integer"),
    "two boxes in one place": (
        lambda d: d["tensors"]["w"]["boxes"][0].update(offsets=[0, 2]),
        "same offsets",
    ),
    "overlap": (lambda d: d["tensors"]["w"]["boxes"][1].update(offsets=[0, 1]), "overlap"),
    "beyond": (lambda d: d["tensors"]["w"]["boxes"][1].update(offsets=[1, 2]), "outside shape"),
    "no such file": (lambda d: d["tensors"]["w"]["boxes"][1].update(file=2), "file 2 of 2"),
    "swapped boxes": (
        lambda d: [b.update(file=1 - b["file"]) for b in d["tensors"]["w"]["boxes"]],
        "has no box w@0,",
    ),
    "path": (lambda d: d["files"][0].update(name="../../etc/passwd"), "files.0.name"),
    "absolute path": (lambda d: d["files"][0].update(name="/etc/passwd"), "files.0.name"),
    "newline": (
        lambda d: d["files"][0].update(name="rank-00000-of-00002.safetensors\n"),
        "files.0.name",
    ),
    "size": (lambda d: d["files"][0].update(size_bytes=1), "bytes, not 1"),
    "another save": (lambda d: d.update(save_id="0" * 32), "another save"),
    "step": (lambda d: d.update(step=-1), "step"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifest_is_refused(name: str, saved: Path) -> None:
    edit, message = EDITS[name]
    edited(saved, edit)
    target = blank()
    with pytest.raises(InputError, match=message):
        checkpoint.load(target, saved)
    assert not target.held[0].tensor.any(), "nothing was overwritten"


def test_file_damage_is_refused_before_anything_is_overwritten(saved: Path) -> None:
    file = saved / "rank-00001-of-00002.safetensors"
    raw = file.read_bytes()
    target = blank()
    for damage, message in (
        (raw[:-1], "bytes, not"),
        (b"\xff" * 8 + raw[8:], "not a whole safetensors file"),
        (raw[:20] + b"}" + raw[21:], "not a whole safetensors file"),
    ):
        file.write_bytes(damage)
        with pytest.raises(InputError, match=message):
            checkpoint.load(target, saved)
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        checkpoint.load(target, saved)
    assert not target.held[0].tensor.any()


def test_file_of_another_save_is_refused(saved: Path) -> None:
    other = saved.with_name("step-2")
    layout = Layout((("x", 2),), ((3,), ("x", 2)))
    simulated_save([FakeTrainer([layout.shard("w", torch.ones(3, 4), r)]) for r in range(2)], other)
    name = "rank-00001-of-00002.safetensors"
    shutil.copy(other / name, saved / name)
    with pytest.raises(InputError, match="another save"):
        checkpoint.load(blank(), saved)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (one(torch.zeros(3, 5)), r"\(3, 4\) in the checkpoint and \(3, 5\) here"),
        (one(torch.zeros(3, 4), "ww"), r"no tensor ww \(nearest: w\)"),
        (one(torch.zeros(3, 4, dtype=torch.int32)), "float32 in the checkpoint and torch.int32"),
    ],
)
def test_another_model_is_refused(shard: FakeShard, message: str, saved: Path) -> None:
    with pytest.raises(InputError, match=message):
        checkpoint.load(FakeTrainer([shard]), saved)


def test_left_over_tensors_are_refused(saved: Path) -> None:
    with pytest.raises(InputError, match="1 tensors that this training run has not"):
        checkpoint.load(FakeTrainer([]), saved)


def test_precision_may_differ(saved: Path) -> None:
    target = FakeTrainer([one(torch.zeros(3, 4, dtype=torch.bfloat16))])
    checkpoint.load(target, saved)
    assert target.held[0].tensor.flatten().tolist() == [float(i) for i in range(12)]


def test_missing_folder_is_refused(saved: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        checkpoint.load(blank(), saved.with_name("step-9"))
    with pytest.raises(InputError, match=r"did you mean .*step-1\?"):
        checkpoint.load(blank(), saved.parent)


def test_boxes_that_do_not_tile_are_a_bug_of_the_trainer(tmp_path: Path) -> None:
    columns = Layout((("x", 2),), ((3,), ("x", 2)))
    lonely = FakeTrainer([columns.shard("w", torch.zeros(3, 4), 0)])
    with pytest.raises(VerifyError, match=r"do not make up w: boxes hold 6 elements"):
        checkpoint.save(lonely, tmp_path / "a")
    with pytest.raises(VerifyError, match="two shards named w"):
        checkpoint.save(FakeTrainer([one(torch.zeros(2)), one(torch.zeros(2))]), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
def test_tiling_problem_equals_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sizes = tuple(data.draw(st.integers(1, n - o)) for o, n in zip(offsets, shape, strict=True))
        boxes.append((offsets, sizes))
    count = torch.zeros(shape)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert (tiling_problem(shape, boxes) is None) == bool((count == 1).all())


# --- atomic saves -----------------------------------------------------------------------------


def killed(action: Callable[[], object]) -> int:
    """Run the action in a forked child; the signal that ended it, 0 where it came through."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DeadlyShard(FakeShard):
    """Its values kill the process that reads them."""

    def __getattribute__(self, name: str) -> Any:
        if name == "tensor" and object.__getattribute__(self, "name") == "z":
            tensor = object.__getattribute__(self, "tensor")
            return _DeadlyTensor(tensor)
        return object.__getattribute__(self, name)


class _DeadlyTensor:
    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype

    def __getitem__(self, _: object) -> None:
        die()


def values(folder: Path) -> list[float]:
    target = blank()
    checkpoint.load(target, folder)
    return [float(x) for x in target.held[0].tensor.flatten()]


def test_save_killed_while_it_writes(tmp_path: Path) -> None:
    first = tmp_path / "step-1"
    checkpoint.save(FakeTrainer([one(torch.ones(3, 4))]), first)
    deadly = DeadlyShard("z", (1,), (FakeBox((0,), (1,), (slice(0, 1),)),), torch.zeros(1))
    trainer = FakeTrainer([one(torch.zeros(3, 4)), deadly], {"step": 2})
    for folder in (tmp_path / "step-2", first):
        assert killed(partial(checkpoint.save, trainer, folder)) == signal.SIGKILL
        assert values(first) == [1.0] * 12
        assert checkpoint.latest(tmp_path) == first
    left = [p for p in tmp_path.iterdir() if ".tmp-" in p.name]
    assert len(left) == 2
    for folder in left:
        with pytest.raises(InputError, match="interrupted before it was complete"):
            checkpoint.load(blank(), folder)
    checkpoint.save(FakeTrainer([one(torch.full((3, 4), 2.0))], {"step": 2}), tmp_path / "step-2")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
    assert [p for p in tmp_path.iterdir() if p.name.startswith("step-2.tmp-")] == []


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_save_killed_between_its_renames(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "last"
    checkpoint.save(FakeTrainer([one(torch.ones(3, 4))]), folder)
    done: list[object] = []
    rename = os.rename

    def deadly(source: Path, target: Path) -> None:
        if len(done) == renames:
            die()
        rename(source, target)
        done.append(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", deadly)
        if renames == 2:
            patch.setattr(safetensors_storage, "fsync_folder", die)
        trainer = FakeTrainer([one(torch.full((3, 4), 2.0))], {"step": 2})
        assert killed(lambda: checkpoint.save(trainer, folder)) == signal.SIGKILL
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    expected = [2.0 if renames == 2 and folder.exists() and values(folder)[0] == 2.0 else 1.0] * 12
    assert values(newest) == values(folder) == expected
    checkpoint.save(FakeTrainer([one(torch.full((3, 4), 3.0))], {"step": 3}), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert values(folder) == [3.0] * 12


def test_foreign_folder_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "thesis.tex").write_text("dear")
    for target in (folder, folder / "thesis.tex"):
        with pytest.raises(InputError, match="never overwritten"):
            checkpoint.save(blank(), target)
    assert (folder / "thesis.tex").read_text() == "dear"
    assert list(tmp_path.iterdir()) == [folder]


def test_disk_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(LaunchError, match=r"No space left on device.*free space"):
            checkpoint.save(blank(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_latest_is_by_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 100, 20):
        checkpoint.save(FakeTrainer([], {"step": step}), tmp_path / f"step-{step}")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-100"


def test_files_are_plain_safetensors(saved: Path) -> None:
    first = load_file(saved / "rank-00000-of-00002.safetensors")
    assert {key: value.tolist() for key, value in first.items()} == {
        "w@0,0": [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
    }


# --- real ranks -------------------------------------------------------------------------------


def forked(num_ranks: int, action: Callable[[int], object], tmp_path: Path) -> None:
    """Run the action on forked gloo ranks; each must come through."""
    rendezvous = tmp_path / f"rendezvous-{len(list(tmp_path.iterdir()))}"
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
                )
                action(rank)
                dist.destroy_process_group()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * num_ranks
    rendezvous.unlink(missing_ok=True)


WHOLE = torch.arange(48.0, dtype=torch.float64).reshape(6, 8)
MEGATRON = Layout((("x", 2), ("y", 2)), ((6,), (2, "x", 2)), ("y",))
ZERO = Layout((("x", 3),), ((6,), (8,)), ("x",), 1)


def test_forked_ranks_save_and_load_through_torch(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"

    def saves(rank: int) -> None:
        trainer = FakeTrainer([MEGATRON.shard("w", WHOLE, rank)], {"step": 3})
        assert checkpoint.save(trainer, folder).wait() == folder

    def loads(rank: int) -> None:
        trainer = FakeTrainer([ZERO.shard("w", torch.zeros_like(WHOLE), rank)])
        checkpoint.load(trainer, folder)
        assert torch.equal(trainer.held[0].tensor, ZERO.shard("w", WHOLE, rank).tensor)
        assert trainer.state == {"step": 3}
        wrong = FakeTrainer([ZERO.shard("w", torch.zeros(6, 8, dtype=torch.int64), rank)])
        with pytest.raises(InputError, match=r"rank 0: w is torch\.float64"):
            checkpoint.load(wrong, folder)
        if rank == 0:
            (folder / MANIFEST).unlink()
        dist.barrier()
        with pytest.raises(InputError, match=r"has no checkpoint\.json"):
            checkpoint.load(trainer, folder)

    forked(4, saves, tmp_path)
    forked(3, loads, tmp_path)


def test_async_save_is_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training overwrites everything while the writers are held back."""

    def runs(rank: int) -> None:
        trained = threading.Event()
        write_data = BoxWriter.write_data

        def held_back(*args: Any) -> Any:
            assert trained.wait(60)
            return write_data(*args)

        monkeypatch.setattr(BoxWriter, "write_data", held_back)
        trainer = FakeTrainer([MEGATRON.shard("w", WHOLE, rank)], {"step": 1, "lr": [0.5]})
        first = checkpoint.save(trainer, tmp_path / "step-1", asynchronous=True)
        trainer.held[0].tensor.fill_(float("nan"))
        trainer.state["lr"][0] = 0.25
        trainer.state["step"] = 2
        # Training goes on talking over its own group, and may even save again.
        for _ in range(20):
            dist.all_reduce(torch.ones(1000))
        second = checkpoint.save(trainer, tmp_path / "step-2", asynchronous=True)
        assert not first.done()
        with pytest.raises(TimeoutError):
            first.wait(0.01)
        trained.set()
        assert first.wait() == tmp_path / "step-1"
        second.wait()
        assert first.done()
        target = FakeTrainer([MEGATRON.shard("w", torch.zeros_like(WHOLE), rank)])
        checkpoint.load(target, tmp_path / "step-1")
        assert torch.equal(target.held[0].tensor, MEGATRON.shard("w", WHOLE, rank).tensor)
        assert target.state == {"step": 1, "lr": [0.5]}
        checkpoint.load(target, tmp_path / "step-2")
        assert target.held[0].tensor.isnan().all()
        assert target.state == {"step": 2, "lr": [0.25]}

    forked(4, runs, tmp_path)


def test_failure_of_one_rank_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(rank: int) -> None:
        trainer = FakeTrainer([MEGATRON.shard("w", WHOLE, rank)])
        write_data = BoxWriter.write_data

        def fails(*args: Any) -> Any:
            if rank == 2:
                raise OSError(28, "No space left on device")
            return write_data(*args)

        monkeypatch.setattr(BoxWriter, "write_data", fails)
        for asynchronous in (False, True):
            with pytest.raises(LaunchError, match=r"rank 2: cannot save .*No space left"):
                checkpoint.save(trainer, tmp_path / "a", asynchronous=asynchronous).wait()

    forked(4, runs, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the user's weights -----------------------------------------------------------------------


@dataclass
class FakeExport:
    held: list[FakeShard]

    def weight_shards(self) -> Iterator[FakeShard]:
        yield from self.held


def test_hugging_face_model_goes_out_and_in(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=12, n_layer=1, n_head=2, tie_word_embeddings=True
    )
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path)
    halves = (("x", 2),)
    layouts = {
        name: Layout(halves, ((p.shape[0],), *((n,) for n in p.shape[1:])), ("x",))
        for name, p in model.named_parameters()
    }

    def exports(rank: int) -> None:
        shards = [
            layouts[name].shard(name, p.detach(), rank) for name, p in model.named_parameters()
        ]
        written = weights.export_safetensors(FakeExport(shards), tmp_path)
        assert written == tmp_path / "model.safetensors"
        weights.export_safetensors(FakeExport(shards), tmp_path / "cut", max_file_bytes=4000)

    forked(2, exports, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    shutil.copy(tmp_path / "config.json", tmp_path / "cut")
    for folder in (tmp_path, tmp_path / "cut"):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(folder)
        for (name, value), (other, found) in zip(
            model.state_dict().items(), loaded.state_dict().items(), strict=True
        ):
            assert name == other
            assert torch.equal(value, found)
        read = weights.import_safetensors(folder)
        for name, p in model.named_parameters():
            assert torch.equal(read(name), p)
            box = read.box(name, [0] * p.dim(), [1] * p.dim())
            assert torch.equal(box, p[(slice(0, 1),) * p.dim()])
    assert len(list((tmp_path / "cut").glob("model-*.safetensors"))) > 2
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


def test_export_replaces_an_export_of_another_form(tmp_path: Path) -> None:
    def export(value: float, max_file_bytes: int) -> list[str]:
        shards = [one(torch.full((4,), value), name) for name in ("a", "b", "c")]
        weights.export_safetensors(FakeExport(shards), tmp_path, max_file_bytes=max_file_bytes)
        read = weights.import_safetensors(tmp_path)
        assert read.names == ("a", "b", "c")
        assert [read(name).tolist() for name in "abc"] == [[value] * 4] * 3
        return sorted(p.name for p in tmp_path.iterdir())

    three = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    two = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert export(1.0, 16) == [*three, "model.safetensors.index.json"]
    assert export(2.0, 32) == [*two, "model.safetensors.index.json"]
    assert export(3.0, 1000) == ["model.safetensors"]
    assert export(4.0, 16) == [*three, "model.safetensors.index.json"]
    file = tmp_path / "mine.safetensors"
    shards = [one(torch.ones(4), name) for name in ("a", "b")]
    assert weights.export_safetensors(FakeExport(shards), file, max_file_bytes=16) == file
    assert sorted(load_file(file)) == ["a", "b"]
    assert (tmp_path / "model.safetensors.index.json").exists()


def test_bad_weights_are_refused(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(bomb)
    with pytest.raises(InputError, match=r"pytorch_model\.bin is pickled and never opened"):
        weights.import_safetensors(folder)
    with pytest.raises(InputError, match="pickled weights are never opened"):
        weights.import_safetensors(folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(bomb)
    with pytest.raises(InputError, match="no whole safetensors file"):
        weights.import_safetensors(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for file in ("../x.safetensors", "/x.safetensors", "x.bin", "a/b.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(InputError, match=r"weight_map\.w"):
            weights.import_safetensors(folder)
    index.write_text(json.dumps({"weight_map": {"wte.weight": "x.safetensors"}})[:-4])
    with pytest.raises(InputError, match="download or export the model again"):
        weights.import_safetensors(folder)
    index.write_text(json.dumps({"weight_map": {"wte.weight": "x.safetensors"}}))
    read = weights.import_safetensors(folder)
    with pytest.raises(InputError, match=r"nearest: wte\.weight"):
        read("wte.weigth")
    with pytest.raises(InputError, match=r"x\.safetensors is missing"):
        read("wte.weight")
    with pytest.raises(InputError, match="no such file or folder"):
        weights.import_safetensors(tmp_path / "nowhere")
    assert not exploded.exists()
