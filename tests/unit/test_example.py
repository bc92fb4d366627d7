"""The demo's training script: what it feeds to the trainer, and the model that it promises."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_bytes.py"

if not SCRIPT.exists():
    pytest.skip("not a source checkout", allow_module_level=True)
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_bytes", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_same_step_same_windows_on_every_rank(script: ModuleType) -> None:
    source = torch.arange(1000).to(torch.uint8)
    first, again, other = (script.draw(source, 4, 16, seed=s) for s in (1, 1, 2))
    assert first["input_ids"].shape == (4, 16)
    assert first["input_ids"].dtype == torch.int64
    assert first["input_ids"].equal(again["input_ids"])
    assert not first["input_ids"].equal(other["input_ids"])


def test_held_out_bytes_are_other_files(script: ModuleType) -> None:
    corpus = script.Corpus.of_the_standard_library()
    assert len(corpus.train) > 3 * len(corpus.held_out) > 100_000
    window = corpus.held_out[:2000].numpy().tobytes()
    assert window not in corpus.train.numpy().tobytes()


def test_model_is_as_promised(script: ModuleType) -> None:
    model = script.build_model()
    assert sum(p.numel() for p in model.parameters()) > 3_000_000
    assert model.config.vocab_size == 256
    assert model.lm_head.weight is model.transformer.wte.weight
    other = script.build_model()
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
