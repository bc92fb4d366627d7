"""The user's weights go out and come in as safetensors."""

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from parloom.errors import InputError
from parloom.execute import weights
from parloom.execute.ranks import fork_ranks
from tests.dist.fake_shards import Bomb, FakeShard, Layout, one


@dataclass(frozen=True)
class FakeParameter:
    name: str
    dtype: str


@dataclass(frozen=True)
class FakeProgram:
    parameters: tuple[FakeParameter, ...] = ()


@dataclass(frozen=True)
class FakePipeline:
    programs: tuple[FakeProgram, ...] = (FakeProgram(),)


@dataclass
class FakeExport:
    held: list[FakeShard]
    pipeline: FakePipeline = FakePipeline()

    def shards(self) -> Iterator[FakeShard]:
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

    def exports() -> None:
        rank = dist.get_rank()
        shards = [
            layouts[name].shard(name, p.detach(), rank) for name, p in model.named_parameters()
        ]
        written = weights.export_safetensors(FakeExport(shards), tmp_path)
        assert written == tmp_path / "model.safetensors"
        weights.export_safetensors(FakeExport(shards), tmp_path / "cut", max_file_bytes=4000)

    fork_ranks(2, exports)
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


def test_only_the_users_weights_go_out_in_their_own_dtype(tmp_path: Path) -> None:
    shards = [
        one(torch.ones(3), "w"),
        one(torch.ones(3), "optimizer/exp_avg/w"),
        one(torch.ones(3), "running_mean"),
        one(torch.ones(3), "inv_freq"),
    ]
    program = FakeProgram((FakeParameter("w", "bfloat16"),))
    trainer = FakeExport(shards, FakePipeline((program,)))
    file = weights.export_safetensors(trainer, tmp_path, names={"w", "lm_head", "running_mean"})
    assert {name: value.dtype for name, value in load_file(file).items()} == {
        "w": torch.bfloat16,
        "running_mean": torch.float32,
    }


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
