"""MODEL forms: what loads, and what each mistake says."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from parloom.capture import fingerprint, load_model
from parloom.capture.load import cast_model
from parloom.errors import InputError, NotYetError
from tests.capture import models

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

FACTORIES = """
import functools
import torch
from torch import nn
from beside import WIDTH

def plain():
    return nn.Linear(WIDTH, 2), {"input": torch.randn(4, WIDTH)}

def with_loss():
    return (*plain(), lambda output, batch: output.sum())

def with_optimizer():
    return (*plain(), functools.partial(torch.optim.SGD, lr=0.1))

def with_both():
    return (*plain(), lambda output, batch: output.sum(), lambda named: None)

def broken():
    raise RuntimeError("no data here")

def shape():
    return nn.Linear(1, 1)

def listed():
    return nn.Linear(1, 1), [torch.ones(1)]

def nested():
    return nn.Linear(1, 1), {"x": {"inner": torch.ones(1)}}

def paired():
    return nn.Linear(1, 1), {"pair": (torch.ones(1), torch.ones(1))}

number = 3
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    path = tmp_path / "factories_under_test.py"
    path.write_text(FACTORIES)
    return path


def test_zoo_models_are_the_same_every_time() -> None:
    first = load_model("zoo:mlp", batch=4, seed=3)
    torch.rand(1)
    again = load_model("zoo:mlp", batch=4, seed=3)
    other = load_model("zoo:mlp", batch=4, seed=4)
    pairs = list(zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.equal(first.batch[k], again.batch[k]) for k in first.batch)
    a, c = next(first.model.parameters()), next(other.model.parameters())
    assert not torch.equal(a, c)


def test_dtype_casts_floats_and_their_batch_only() -> None:
    loaded = load_model("zoo:gpt", batch=2, seq=8, dtype="fp64")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float64}
    assert {t.dtype for t in loaded.batch.values()} == {torch.int64}
    assert load_model("zoo:mlp", batch=2, dtype="bf16").batch["x"].dtype == torch.bfloat16


def test_a_dtype_leaves_complex_tensors_complex() -> None:
    """`Module.to` would drop the imaginary parts of weights and tables."""
    model = nn.Linear(4, 4)
    model.waves = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
    for dtype in (torch.bfloat16, torch.float64):
        cast_model(model, dtype)
        assert model.weight.dtype == dtype
        assert model.waves.dtype == model.get_buffer("turns").dtype == torch.complex64
        assert model.waves.imag.abs().max() > 0


def test_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    loaded = load_model(str(path), batch=3)
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert loaded.model.training
    assert not getattr(loaded.model.config, "use_cache", True)
    assert {k: tuple(v.shape) for k, v in loaded.batch.items()} == {
        "input_ids": (3, 16),
        "labels": (3, 16),
    }
    folder = load_model(str(tmp_path), seq=5, device="meta", dtype="bf16")
    assert {p.device.type for p in folder.model.parameters()} == {"meta"}
    assert folder.batch["input_ids"].shape == (8, 5)
    # frequencies are computed, not learned: narrowing them would move positions
    buffers = dict(folder.model.named_buffers())
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32
    with pytest.raises(InputError, match="more than the model's 16 positions"):
        load_model(str(path), seq=17)


def test_factories(factories: Path) -> None:
    plain = load_model(f"{factories}:plain")
    assert isinstance(plain.model, nn.Linear)
    assert (plain.loss, plain.optimizer) == (None, None)
    assert load_model(f"{factories}:with_loss").loss is not None
    one = load_model(f"{factories}:with_optimizer")
    assert one.loss is None
    assert one.optimizer is not None
    both = load_model(f"{factories}:with_both")
    assert both.loss is not None
    assert both.optimizer is not None


def test_importable_factories(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(factories.parent)
    assert load_model("factories_under_test:plain").batch["input"].shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", r"raised at .*factories_under_test\.py:20: RuntimeError: no data here"),
        ("shape", r"returned a Linear; return \(model, batch\)"),
        ("listed", "the batch is a list; it must be a dict of tensors"),
        ("nested", r"batch\['x'\] is a dict; values must be tensors"),
        ("paired", r"batch\['pair'\] is a tuple; values must be tensors"),
        ("plan", "did you mean plain"),
        ("number", "is a int, not a function"),
    ],
)
def test_factory_mistakes(factories: Path, name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_model(f"{factories}:{name}")


def test_sizes_without_effect_are_refused(factories: Path) -> None:
    for asked in ({"batch": 8}, {"seq": 4}):
        (name,) = asked
        with pytest.raises(InputError, match=f"builds its own batch; --{name} has no effect"):
            load_model(f"{factories}:plain", **asked)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="zoo:mlp: its batch has no sequence; --seq has no effect"):
        load_model("zoo:mlp", seq=7)
    assert load_model("zoo:gpt", batch=2, seq=7).batch["input_ids"].shape == (2, 7)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("zoo:mpl", "did you mean zoo:mlp"),
        ("mlp", "did you mean zoo:mlp"),
        ("no_such_package.models:build", "no module 'no_such_package.models'"),
        ("nowhere.py:build", "no file nowhere.py"),
        ("nowhere/config.json", "no file nowhere/config.json"),
        ("./nothing", "a model is zoo:NAME"),
        ("", "a model is zoo:NAME"),
    ],
)
def test_unknown_models(spec: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_model(spec)


def test_other_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean fp32"):
        load_model("zoo:mlp", dtype="fp23")
    bad = tmp_path / "bad.py"
    bad.write_text("def f(:\n")
    with pytest.raises(InputError, match=r"bad\.py:1:7: SyntaxError"):
        load_model(f"{bad}:f")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not a Hugging Face config"):
        load_model(str(tmp_path))
    with pytest.raises(NotYetError, match="unpickles"):
        load_model("saved.pt2")


def test_unknown_hub_ids_say_what_was_tried() -> None:
    with pytest.raises(
        InputError,
        match="as a Hub id there is no network, and the config for nobody/no-such-model is not in",
    ):
        load_model("nobody/no-such-model")


def test_fingerprint_follows_structure_not_values() -> None:
    model, batch = models.perceptron()
    base = fingerprint(model, batch)
    assert len(base) == 16
    assert int(base, 16) >= 0
    assert fingerprint(*models.perceptron()) == base
    assert fingerprint(models.Perceptron(7), batch) != base
    assert fingerprint(model, {**batch, "x": batch["x"][:2]}) != base
    assert fingerprint(model.double(), batch) != base
    model.float().head.requires_grad_(False)
    assert fingerprint(model, batch) != base
