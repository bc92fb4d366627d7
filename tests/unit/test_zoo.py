"""Every zoo model builds, trains and is the same each time; a new model is covered at once."""

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import parloom.zoo
from parloom import zoo


def small(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return zoo.build(name, batch=4, seq=16, scale=0.125)


@pytest.mark.parametrize("name", zoo.names())
def test_loss_and_gradients_are_finite(name: str) -> None:
    model, batch = small(name)
    loss = model(**batch)[0]
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


@pytest.mark.parametrize("name", zoo.names())
def test_same_seed_same_model_and_batch(name: str) -> None:
    (first, a), (second, b) = small(name), small(name)
    assert a.keys() == b.keys()
    assert all(a[k].equal(b[k]) for k in a)
    assert all(v.equal(second.state_dict()[k]) for k, v in first.state_dict().items())
    assert first(**a)[0].equal(second(**b)[0])


@pytest.mark.parametrize("name", zoo.names())
def test_every_batch_tensor_has_the_batch_first(name: str) -> None:
    _, batch = small(name)
    assert {t.shape[0] for t in batch.values()} == {4}


@pytest.mark.parametrize("name", zoo.names())
def test_builds_on_meta_with_a_real_batch(name: str) -> None:
    with torch.device("meta"):
        model, batch = small(name)
    assert all(p.is_meta for p in model.parameters())
    assert all(t.device.type == "cpu" for t in batch.values())


@pytest.mark.parametrize("name", zoo.names())
def test_scale_shrinks(name: str) -> None:
    def count(scale: float) -> int:
        model, _ = zoo.build(name, batch=1, seq=8, scale=scale)
        return sum(p.numel() for p in model.parameters())

    assert count(0.125) < count(0.25) < count(0.5)


def test_models_that_the_proof_needs() -> None:
    gpt, batch = zoo.build("gpt", batch=2, seq=8, vocab=97, width=24, depth=2, heads=2)
    assert isinstance(gpt.get_submodule("head").weight, nn.Parameter)
    assert gpt.get_submodule("head").weight is gpt.get_submodule("tokens").weight
    assert gpt.get_submodule("head").weight.shape == (97, 24)
    assert int(batch["input_ids"].max()) < 97
    llama, _ = zoo.build("llama", heads=4, groups=2, width=32)
    assert llama.get_submodule("blocks.0.attention.k").weight.shape == (16, 32)


def test_padding_differs_between_rows() -> None:
    _, batch = zoo.build("gpt", batch=8, seq=64)
    assert len(set((batch["labels"] == -100).sum(1).tolist())) > 1


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(KeyError):
        zoo.build("no-such-model")
    with pytest.raises(ValueError, match=r"zoo:mlp has no size 'widht'; it has scale, features"):
        zoo.build("mlp", widht=3)
    with pytest.raises(ValueError, match="3 key heads do not divide 8 query heads"):
        zoo.build("llama", groups=3)


def test_sizes_are_documented_defaults() -> None:
    assert zoo.sizes("mlp") == {
        "scale": 1.0, "features": 256, "hidden": 1024, "depth": 3, "classes": 16,
    }  # fmt: skip


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_imports_torch_only() -> None:
    package: ModuleType = parloom.zoo
    (folder,) = package.__path__
    for file in sorted(Path(folder).glob("*.py")):
        extra = imported(file.read_text()) - sys.stdlib_module_names - {"torch", "parloom"}
        assert not extra, file.name
