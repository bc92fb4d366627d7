"""What a Hugging Face config may not do: load code, kernels or weights; each key is named."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from parloom.capture import capture, load_model
from parloom.capture.check import remarks
from parloom.capture.hugging_face import read_config
from parloom.errors import InputError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 37,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TEXT = {key: value for key, value in LLAMA.items() if key != "architectures"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: object, **kwargs: object) -> None:
        raise AssertionError("a config reached for the network")

    monkeypatch.setattr(socket.socket, "connect", connect)


def written(folder: Path, **settings: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | settings))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"attn_implementation": "kernels-community/flash-attn2"}, "attn_implementation"),
        ({"_attn_implementation": "org/repo:function"}, "_attn_implementation"),
        ({"_attn_implementation_internal": "org/repo@main:f"}, "_attn_implementation_internal"),
        ({"attn_implementation": "paged|org/repo"}, "attn_implementation"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation"),
        ({"attn_implementation": "sdpa\n"}, "attn_implementation"),
        ({"attn_implementation": ["sdpa"]}, "attn_implementation"),
        ({"attn_implementation": {"": "sdpa", "text": "org/repo"}}, "attn_implementation"),
        ({"attn_implementation": True}, "attn_implementation"),
        ({"experts_implementation": "org/repo:f"}, "experts_implementation"),
        ({"_experts_implementation": "sonicmoe"}, "_experts_implementation"),
        ({"text_config": {"attn_implementation": "org/repo"}}, "text_config.attn_implementation"),
        ({"a": [{"b": {"_attn_implementation": "o/r"}}]}, "a.0.b._attn_implementation"),
        ({"per_layer_config": {"0": {"attn_implementation": "o/r"}}}, "per_layer_config.0.attn"),
        ({"use_pretrained_backbone": True}, "use_pretrained_backbone"),
        ({"use_kernels": True}, "use_kernels"),
        ({"kernel_config": {"RMSNorm": "org/repo:RMSNorm"}}, "kernel_config"),
        ({"backbone": "hf-hub:org/repo"}, "backbone"),
        ({"vision_config": {"architecture": "local-dir:/tmp/x"}}, "vision_config.architecture"),
    ],
)
def test_settings_that_load_code_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError, match=f"config.json: {key}"):
        read_config(written(tmp_path, **settings))


@pytest.mark.parametrize("name", ["pipeline", "logging", "AutoConfig", "Trainer", "cached_file"])
def test_architectures_are_models(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no architecture"):
        load_model(written(tmp_path, architectures=[name]))


@pytest.mark.parametrize("name", [None, "eager", "sdpa"])
def test_built_in_attention_is_taken(tmp_path: Path, name: str | None) -> None:
    loaded = load_model(written(tmp_path, attn_implementation=name), batch=2, seq=4)
    assert capture(loaded.model, loaded.batch).main.body


def test_code_beside_the_config_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    quantized = {"quant_method": "fp8", "custom": "evil.Quantizer"}
    written(tmp_path, auto_map=code, quantization_config=quantized, trust_remote_code=True)
    loaded = load_model(str(tmp_path), batch=2, seq=4)
    assert type(loaded.model).__module__.startswith("transformers.models.llama")
    (line,) = remarks(loaded.model, capture(loaded.model, loaded.batch))
    assert "auto_map" in line
    assert "quantization_config" in line
    written(tmp_path, auto_map=code, model_type="evil", architectures=["EvilForCausalLM"])
    with pytest.raises(InputError, match="not a Hugging Face config"):
        load_model(str(tmp_path))
    assert not marker.exists()


def test_parts_are_stripped_too(tmp_path: Path) -> None:
    settings = {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
        "text_config": TEXT | {"quantization_config": {"quant_method": "gptq"}},
        "vision_config": {"model_type": "clip_vision_model", "auto_map": {"AutoModel": "x.Y"}},
    }  # fmt: skip
    config = read_config(written(tmp_path, **settings))
    assert config.parloom_left_out == ["text_config.quantization_config", "vision_config.auto_map"]
    assert not hasattr(config.text_config, "quantization_config")


@pytest.mark.parametrize(("dtype", "said"), [(None, True), ("bf16", False)])
def test_a_dtype_of_the_config_that_is_not_planned_is_said(
    tmp_path: Path, dtype: str | None, said: bool
) -> None:
    loaded = load_model(written(tmp_path, torch_dtype="bfloat16"), batch=2, seq=4, dtype=dtype)
    lines = remarks(loaded.model, capture(loaded.model, loaded.batch))
    asked = "the config says bfloat16, the model is planned in float32 (--dtype bfloat16 plans it"
    assert any(line.startswith(asked) for line in lines) == said
