"""Rows that tables of positions do not have."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig

from parloom.capture.generation import capture_generation
from parloom.errors import InputError
from parloom.inference import check_positions

CONFIGS: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=16),
    # Turns by a table of its own, which is gathered from.
    "gptj": lambda: GPTJConfig(
        n_embd=8, n_layer=1, n_head=2, rotary_dim=4, vocab_size=9, n_positions=16
    ),
}


def _check(name: str, prompt: int, new_tokens: int) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    made = capture_generation(model, {"input_ids": torch.zeros(2, prompt).long()}, new_tokens)
    check_positions(made.decode, made.prefill, new_tokens)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_token_has_a_position(name: str) -> None:
    """The last token is not read: of 5 after 12, four are, at positions 12 to 15."""
    _check(name, 12, 5)
    with pytest.raises(InputError, match=r"reads row 16 of a table .*\(--new-tokens\)"):
        _check(name, 12, 6)


def test_prompts_are_within_the_table() -> None:
    _check("gpt2", 16, 1)
    with pytest.raises(InputError, match=r"reads row 16 of a table .* prompts are longer"):
        _check("gpt2", 17, 1)
