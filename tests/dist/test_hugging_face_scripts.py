"""Scripts that build a Hugging Face model as its documentation says train what was planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parloom import api
from parloom.capture import load_model
from parloom.errors import FingerprintError, InputError

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
# No token to start with: labels could not be shifted.
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 64,
      "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}  # fmt: skip
CLIP = {
    "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 8,
    "text_config": {**SMALL, "projection_dim": 8, "eos_token_id": 2},
    "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                      "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
                      "projection_dim": 8},
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def planned(spec: str, **asked: Any) -> Any:
    return api.plan(spec, cluster="1xcpu", method="data_parallel", batch=2, seq=8, **asked)


def of_the_script(spec: str, config: dict[str, Any]) -> Any:
    """The model as a script that knows nothing of plans builds it."""
    torch.manual_seed(0)
    kind = getattr(transformers, config["architectures"][0])
    return kind(transformers.AutoConfig.from_pretrained(spec))


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, T5, CLIP], ids=lambda c: c["model_type"])
def test_a_model_with_its_own_settings_is_the_planned_one(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    spec = written(tmp_path, config)
    plan = planned(spec)
    model, made = of_the_script(spec, config), load_model(spec, batch=2, seq=8)
    made.model.load_state_dict(model.state_dict())
    settings = model.config.to_dict()
    trainer = api.parallelize(model, plan, optimizer=torch.optim.AdamW)
    expected = made.model.eval()(**made.batch).loss.detach()
    torch.testing.assert_close(trainer.evaluate(made.batch).loss, expected)
    batch = ", ".join(f"{name} {list(t.shape)}" for name, t in made.batch.items())
    assert f"batch as built: {batch}" in plan.assumptions
    with pytest.raises(InputError, match=r"batch\.pop\('attention_mask'\).*file\.py:factory"):
        trainer.step({**made.batch, "attention_mask": torch.ones(2, 8)})
    assert model.config.to_dict() == settings
    assert "forward" not in vars(model)
    trainer.step(made.batch)  # nothing is another one since parallelize


def test_other_settings_are_compared(tmp_path: Path) -> None:
    spec = written(tmp_path, LLAMA)
    plan = planned(spec)
    model = of_the_script(spec, LLAMA)
    model.model.layers[0].self_attn.scaling = 0.75
    with pytest.raises(FingerprintError, match=r"scale .* in the plan, 0\.75 here"):
        api.parallelize(model, plan, optimizer=torch.optim.AdamW)


def test_a_factorys_model_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "cached.py").write_text(
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "def factory():\n"
        f"    model = LlamaForCausalLM(LlamaConfig(**{SMALL}, use_cache=False))\n"
        "    ids = torch.arange(16).reshape(2, 8)\n"
        "    return model, {'input_ids': ids, 'labels': ids}\n"
    )
    spec = f"{tmp_path}/cached.py:factory"
    plan = api.plan(spec, cluster="1xcpu", method="data_parallel")
    model: Any = load_model(spec).model
    model.config.use_cache = True
    with pytest.raises(FingerprintError, match=r"self_attn: cat .*is not in the plan"):
        api.parallelize(model, plan, optimizer=torch.optim.AdamW)
