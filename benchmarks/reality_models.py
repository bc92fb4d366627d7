"""Models of the reality benchmark, as factories for `parloom plan`: (model, global batch)."""

from typing import Any

import torch
import transformers
from cluster_models import Built, gpt, mlp

from parloom import zoo
from parloom.capture.hugging_face import build_from_config

BATCH, SEQ = 16, 64


def _hugging_face(name: str, **sizes: Any) -> Built:
    torch.manual_seed(0)
    config = getattr(transformers, name).config_class(**sizes)
    config.architectures = [name]
    return build_from_config(config, BATCH, SEQ)


def llama() -> Built:
    """Hugging Face's Llama: 1.5 M parameters; batch 16, sequence 64."""
    return _hugging_face(
        "LlamaForCausalLM", vocab_size=512, hidden_size=160, intermediate_size=432,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip


def bert() -> Built:
    """Hugging Face's Bert for masked tokens, without dropout: 1.7 M parameters; batch 16."""
    return _hugging_face(
        "BertForMaskedLM", vocab_size=512, hidden_size=160, intermediate_size=640,
        num_hidden_layers=5, num_attention_heads=4, max_position_embeddings=SEQ,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def cnn() -> Built:
    """The zoo's CNN: 1.2 M parameters, batch 32."""
    torch.manual_seed(0)
    return zoo.build("cnn", batch=32, channels=80, image=16, depth=2, classes=16)


MODELS = {"mlp": mlp, "gpt": gpt, "llama": llama, "bert": bert, "cnn": cnn}
