"""Bad values in Hugging Face configs: exit code 2 with file, line, key and value."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parloom import api
from parloom.capture import config_faults, hugging_face, load_model
from parloom.capture.batches import MOST_ELEMENTS
from parloom.capture.config_faults import MOST_BYTES, faults, read_values
from parloom.errors import CaptureError, InputError

GPT = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 32, "n_embd": 16,
       "n_layer": 1, "n_head": 4, "n_positions": 16}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 32,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
VIT = {**BERT, "architectures": ["ViTForImageClassification"], "model_type": "vit",
       "image_size": 16, "patch_size": 8}  # fmt: skip
CLIP = {
    "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 8,
    "text_config": {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    },
}  # fmt: skip


def planned(document: Any, folder: Path, seq: int | None = 8) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    api.capture(str(path), batch=2, seq=seq)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GPT, "n_head", 3),
        (GPT, "n_head", 0),
        (GPT, "n_embd", -16),
        (GPT, "n_embd", "sixteen"),
        (GPT, "n_layer", 10**9),
        (GPT, "n_layer", 1.5),
        (GPT, "vocab_size", 0),
        (GPT, "vocab_size", -1),
        (GPT, "vocab_size", 10**30),
        (GPT, "resid_pdrop", 2.0),
        (GPT, "attn_pdrop", -0.5),
        (GPT, "activation_function", "nothing"),
        (GPT, "activation_function", None),
        (GPT, "architectures", "GPT2LMHeadModel"),
        (GPT, "architectures", [0]),
        (GPT, "architectures", ["GPT2LMHeadModell"]),
        (GPT, "architectures", {"a": 1}),
        (GPT, "model_type", "gpt22"),
        (GPT, "model_type", {}),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_key_value_heads", 0),
        (LLAMA, "rope_parameters", {"rope_type": "nothing"}),
        (LLAMA, "rope_parameters", 7),
        (LLAMA, "hidden_act", 3),
        (LLAMA, "attention_dropout", 7.0),
        (LLAMA, "attention_dropout", float("nan")),
        (LLAMA, "pad_token_id", 99),
        (LLAMA, "num_hidden_layers", 60_000),
        (BERT, "hidden_dropout_prob", "x"),
        (BERT, "layer_norm_eps", "small"),
        (BERT, "type_vocab_size", 0),
        (BERT, "max_position_embeddings", 0),
        (VIT, "patch_size", 0),
        (VIT, "patch_size", 64),
        (VIT, "image_size", [16]),
        (VIT, "num_labels", 10**9),
        (CLIP, "projection_dim", -1),
    ],
    ids=str,
)
def test_a_bad_value_is_named(
    config: dict[str, Any],
    key: str,
    value: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Far above these models of one layer; fifty thousand modules take seconds in every attempt.
    monkeypatch.setattr(hugging_face, "MOST_MODULES", 1000)
    with pytest.raises(InputError) as refused:
        planned({**config, key: value}, tmp_path, None if config is VIT else 8)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path / 'config.json'}:"), said
    assert key in said, said
    assert "\n" not in said, said


def test_the_key_of_a_part_is_named(tmp_path: Path) -> None:
    text = {**CLIP["text_config"], "hidden_act": "nothing"}  # type: ignore[dict-item]
    with pytest.raises(InputError, match=r"config.json:\d+:\d+: text_config.hidden_act is \"nothi"):
        planned({**CLIP, "text_config": text}, tmp_path)


def test_two_bad_keys_are_both_named(tmp_path: Path) -> None:
    config = {**GPT, "activation_function": "nothing", "vocab_size": -3}
    with pytest.raises(InputError, match=r"activation_function.*of all of these keys") as said:
        planned(config, tmp_path)
    assert "vocab_size is -3" in str(said.value)


def test_the_position_is_that_of_the_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"json:7:2: n_embd is 16, n_head is 3: .*one of"):
        planned({**GPT, "n_head": 3}, tmp_path)


def test_a_batch_beyond_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT, "n_positions": 10**9}), encoding="utf-8")
    with pytest.raises(InputError, match=rf"more than {MOST_ELEMENTS:,} elements \(input_ids"):
        load_model(str(path), batch=10**6, seq=10**6, device="meta")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r":1:1: not a Hugging Face config: not JSON"),
        (b"[1]", ":1:1: .*expected an object"),
        (b'{"a": 1,\n]', ":2:1: .*not JSON"),
        (b"\xff\xfe{", "no text in UTF-8"),
        (b"\xef\xbb\xbf{}", ":1:1: .*Unexpected UTF-8 BOM"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "limit"),
        (b" " * (MOST_BYTES + 1), "more than 16 MiB"),
    ],
    ids=range(8),
)
def test_what_is_no_config_is_told_with_its_position(
    content: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"config\.json.*{said}"):
        read_values(path)


def test_a_model_that_cannot_be_captured_for_no_key_stays_exit_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Iterator[None]:
        raise CaptureError("cannot capture GPT2Model.h.0 (modeling_gpt2.py:1): no rule")

    monkeypatch.setattr(api, "capture_microbatch", fails)
    with pytest.raises(CaptureError, match="no rule"):
        planned(GPT, tmp_path)


def test_blame_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with pytest.raises(InputError):
        planned({**GPT, "n_head": 3}, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_as_few_keys_as_can_be_are_blamed() -> None:
    def attempt(values: dict[str, Any]) -> None:
        if "b" in values and values.get("d", 0) > 3:
            raise ValueError
        if "c" in values:
            raise KeyError

    assert faults({"a": 1, "b": 1}, attempt) == []
    assert faults({"a": 1, "c": 2, "b": 1}, attempt) == [("c",)]
    assert faults({"b": 1, "a": 1, "d": 4}, attempt) == [("b",), ("d",)]
    assert faults({"a": 1, "b": 1, "c": 1, "d": 4}, attempt) == [("b",), ("c",)]


def test_a_config_of_many_keys_costs_few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time stands still until the keys that are bad together are found."""
    tried: list[int] = []

    def attempt(values: dict[str, Any]) -> None:
        tried.append(len(values))
        if any(values.get(key) for key in ("k17", "k4000", "k4999")):
            raise ValueError

    values: dict[str, Any] = dict.fromkeys((f"k{i}" for i in range(5000)), "x")
    clock = iter(range(10**9))
    monkeypatch.setattr("parloom.capture.config_faults.time.monotonic", lambda: next(clock))
    monkeypatch.setattr(config_faults, "MOST_S", 60)
    assert faults(values, attempt) == [("k17",), ("k4000",), ("k4999",)]
    assert len(tried) <= 61


def test_no_attempt_begins_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def attempt(values: dict[str, Any]) -> None:
        tried.append(len(values))
        raise ValueError

    monkeypatch.setattr(config_faults, "MOST_S", -1.0)
    assert faults({f"k{i}": 1 for i in range(1000)}, attempt) == []
    assert len(tried) == 1


def test_one_of_many_keys_is_blamed_alone() -> None:
    def attempt(values: dict[str, Any]) -> None:
        if values.get("k40", 1) != 1:
            raise ValueError

    assert faults({f"k{i}": 3 for i in range(100)}, attempt) == [("k40",)]


def test_thousands_of_keys_that_nobody_knows_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_faults, "MOST_S", 5.0)
    with pytest.raises(InputError, match=r"n_head is 3"):
        planned({**GPT, "n_head": 3, **{f"k{i}": 1 for i in range(3000)}}, tmp_path)
