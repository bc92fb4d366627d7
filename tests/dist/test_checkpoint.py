"""Checkpoints: saved under any layout by any ranks, loaded under any other."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parloom.errors import InputError, LaunchError
from parloom.execute import checkpoint
from parloom.execute.box_planner import BoxLoadPlanner
from parloom.execute.manifest import (
    MANIFEST,
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    tiling_problem,
)
from parloom.execute.ranks import fork_ranks
from parloom.execute.safetensors_storage import BoxReader, BoxWriter
from tests.dist.fake_shards import (
    FakeBox,
    FakeShard,
    FakeTrainer,
    Layout,
    layouts,
    simulated_load,
    simulated_save,
)
from tests.examples import examples

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


@given(data=st.data())
@examples(60)
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
        "plateau": {"best": float("inf"), "worst": [float("-inf")]},
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


@pytest.mark.parametrize("value", [torch.zeros(1), {1, 2}, b"raw", {"x": [1j]}])
def test_extra_state_that_is_not_json_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not JSON"):
        checkpoint.save(FakeTrainer([], {"step": 0, "x": value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


WHOLE = torch.arange(48.0, dtype=torch.float64).reshape(6, 8)
MEGATRON = Layout((("x", 2), ("y", 2)), ((6,), (2, "x", 2)), ("y",))
ZERO = Layout((("x", 3),), ((6,), (8,)), ("x",), 1)


def test_forked_ranks_save_and_load_through_torch(tmp_path: Path) -> None:
    folder = tmp_path / "step-3"

    def saves() -> None:
        rank = dist.get_rank()
        trainer = FakeTrainer([MEGATRON.shard("w", WHOLE, rank)], {"step": 3})
        assert checkpoint.save(trainer, folder).wait() == folder

    def loads() -> None:
        rank = dist.get_rank()
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

    fork_ranks(4, saves)
    fork_ranks(3, loads)


def test_async_save_is_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training overwrites everything while the writers are held back."""

    def runs() -> None:
        rank = dist.get_rank()
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

    fork_ranks(4, runs)


def test_failure_of_one_rank_reaches_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> None:
        rank = dist.get_rank()
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

    fork_ranks(4, runs)
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
