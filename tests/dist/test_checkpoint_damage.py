"""Checkpoints: nothing is executed, nothing half-written loads, damage is named."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parloom.errors import InputError, LaunchError, VerifyError
from parloom.execute import checkpoint, safetensors_storage
from parloom.execute.checksums import check_sums
from parloom.execute.manifest import MANIFEST, Manifest, read_manifest
from tests.dist.fake_shards import (
    Bomb,
    FakeBox,
    FakeShard,
    FakeTrainer,
    Layout,
    one,
    simulated_save,
)

# --- refusals ---------------------------------------------------------------------------------


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


def test_planted_pickles_are_not_opened(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exploded = tmp_path / "exploded"
    plant(saved, exploded)
    target = blank()
    with monkeypatch.context() as patch:
        for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
            patch.setattr(
                module, name, partial(pytest.fail, f"{module.__name__}.{name} was called")
            )
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
    "later version": (lambda d: d.update(version=3), "version"),
    "no checksum": (
        lambda d: d["tensors"]["w"]["boxes"][1].update(crc32=None),
        "checksum is missing",
    ),
    "no checksum of a header": (lambda d: d["files"][0].pop("header_crc32"), "checksum is missing"),
    "another checksum": (
        lambda d: d["tensors"]["w"]["boxes"][1].update(crc32=1),
        r"rank-00001-of-00002\.safetensors: tensor w has checksum \d+, not 1;",
    ),
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


def test_one_flipped_bit_anywhere_is_refused(saved: Path) -> None:
    """In the manifest, in a header or in the data; the file is named, and of data the tensor."""
    whole = {file: file.read_bytes() for file in sorted(saved.iterdir())}
    generator = torch.Generator().manual_seed(0)
    target, named = blank(), 0
    for file, raw in whole.items():
        drawn = torch.randint(0, len(raw) * 8, (150,), generator=generator).tolist()
        data = range((len(raw) - 8) * 8, len(raw) * 8) if file.suffix == ".safetensors" else ()
        for bit in (*drawn, *data):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises(InputError, match=re.escape(str(file))) as refused:
                checkpoint.load(target, saved)
            named += "tensor w has checksum" in str(refused.value)
        file.write_bytes(raw)
    assert named >= 2 * 8 * 8
    assert not target.held[0].tensor.any(), "nothing was overwritten"
    checkpoint.load(target, saved)


def test_ranks_share_the_comparison(saved: Path) -> None:
    """Every byte is some rank's, whatever the number of ranks."""
    manifest = read_manifest(saved)
    for index, entry in enumerate(manifest.files):
        path = saved / entry.name
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        for world in (1, 2, 3, 7):
            found = [rank for rank in range(world) if refuses(saved, manifest, rank, world)]
            assert len(found) == 1, (index, world)
        path.write_bytes(raw)


def refuses(folder: Path, manifest: Manifest, rank: int, world: int) -> bool:
    try:
        check_sums(folder, manifest, rank, world)
    except InputError:
        return True
    return False


def test_checkpoints_of_older_versions_load_with_a_warning(saved: Path) -> None:
    def older(document: dict[str, Any]) -> None:
        document["version"] = 1
        for file in document["files"]:
            del file["header_crc32"]
        for box in document["tensors"]["w"]["boxes"]:
            del box["crc32"]

    edited(saved, older)
    target = blank()
    with pytest.warns(UserWarning, match="step-1 has no checksums"):
        checkpoint.load(target, saved)
    assert target.held[0].tensor.flatten().tolist() == [float(i) for i in range(12)]


def test_folders_of_killed_saves_are_named(saved: Path) -> None:
    left = saved.with_name(f"step-2.tmp-{'a' * 32}")
    left.mkdir()
    saved.with_name("step-3.tmp-notes").mkdir()
    with pytest.warns(UserWarning, match=rf"complete: {left.name}; nothing reads them"):
        checkpoint.load(blank(), saved)


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
    with warnings.catch_warnings():  # of what killed saves left
        warnings.filterwarnings("ignore", message="beside checkpoint")
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


def test_header_that_safetensors_would_refuse_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_storage, "MAX_HEADER_BYTES", 100)
    with pytest.raises(InputError, match=r"1 boxes need a header of .* in blocks"):
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
