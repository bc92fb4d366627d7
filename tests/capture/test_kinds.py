"""Repeated blocks are found: which block kinds each model has, and where they are called.

Blocks of a list are one kind where operators and shapes are the same: the first block of a stage,
which changes the size, is none of the others', and Swin's plain and shifted blocks are two.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from parloom.capture import capture
from parloom.capture.hugging_face import build_from_config
from parloom.ir.graph import Call, Graph
from tests.zoo_sizes import small

Kinds = dict[str, tuple[str, ...]]  # block function -> where it is called
TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 4}
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "BertForMaskedLM": TEXT,
        "GPT2LMHeadModel": {
            "vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        "LlamaForCausalLM": TEXT,
        "MixtralForCausalLM": {**TEXT, "num_local_experts": 2, "output_router_logits": True},
        "T5ForConditionalGeneration": {
            "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2,
        },
        "BartForConditionalGeneration": {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32, "max_position_embeddings": 16,
        },
        "ViTForImageClassification": {**TEXT, **IMAGE},
        "SwinForImageClassification": {
            **IMAGE, "patch_size": 2, "embed_dim": 8, "depths": (1, 4), "num_heads": (2, 2),
            "window_size": 2, "drop_path_rate": 0.0,
        },
        "ResNetForImageClassification": {
            "embedding_size": 8, "hidden_sizes": (16, 32), "depths": (3, 4), "num_labels": 4,
        },
    }
)  # fmt: skip


def listed(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    config: Any = getattr(transformers, name).config_class(**SIZES[name])
    config.architectures = [name]
    with torch.device("meta"):
        return build_from_config(config, 2, 8)


def kinds(graph: Graph) -> Kinds:
    """Block functions of the whole program and the modules that each stands for."""
    found: Kinds = {}

    def visit(body: tuple[object, ...], prefix: str) -> Iterator[tuple[str, str]]:
        for item in body:
            if isinstance(item, Call):
                path = f"{prefix}.{item.prefix}" if prefix else item.prefix
                yield item.function, path
                yield from visit(graph.by_name[item.function].body, path)

    for function, path in visit(graph.main.body, ""):
        found[function] = (*found.get(function, ()), path)
    return found


def numbered(pattern: str, *numbers: int) -> tuple[str, ...]:
    """The pattern with each number in place of its star."""
    return tuple(pattern.replace("*", str(n)) for n in numbers)


# The first block of T5 has the relative positions, so its parts are kinds by themselves.
LISTED: Mapping[str, Kinds] = MappingProxyType(
    {
        "BertForMaskedLM": {"bert_layer": numbered("bert.encoder.layer.*", 0, 1, 2)},
        "GPT2LMHeadModel": {"gpt2_block": numbered("transformer.h.*", 0, 1, 2)},
        "LlamaForCausalLM": {"llama_decoder_layer": numbered("model.layers.*", 0, 1, 2)},
        "MixtralForCausalLM": {"mixtral_decoder_layer": numbered("model.layers.*", 0, 1, 2)},
        "T5ForConditionalGeneration": {
            "t5_layer_ff": ("encoder.block.0.layer.1", "decoder.block.0.layer.2"),
            "t5_block": numbered("encoder.block.*", 1, 2),
            "t5_block_2": numbered("decoder.block.*", 1, 2),
        },
        "BartForConditionalGeneration": {
            "bart_encoder_layer": numbered("model.encoder.layers.*", 0, 1),
            "bart_decoder_layer": numbered("model.decoder.layers.*", 0, 1, 2),
        },
        "ViTForImageClassification": {"vit_layer": numbered("vit.layers.*", 0, 1, 2)},
        "SwinForImageClassification": {
            "swin_layer": numbered("swin.encoder.layers.1.blocks.*", 0, 2),
            "swin_layer_2": numbered("swin.encoder.layers.1.blocks.*", 1, 3),
        },
        "ResNetForImageClassification": {
            "res_net_bottle_neck_layer": numbered("resnet.encoder.stages.0.layers.*", 1, 2),
            "res_net_bottle_neck_layer_2": numbered("resnet.encoder.stages.1.layers.*", 1, 2, 3),
        },
    }
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LISTED)
def test_kinds_of_listed_models(name: str) -> None:
    assert kinds(capture(*listed(name))) == LISTED[name]


def test_stages_of_a_cnn() -> None:
    graph = capture(*small("resnext50", depths=(3, 2, 1, 3)))
    assert kinds(graph) == {
        "bottleneck": numbered("stages.0.*", 1, 2),
        "bottleneck_2": numbered("stages.3.*", 1, 2),
    }


def test_blocks_in_turns() -> None:
    assert kinds(capture(*small("gshard", depth=6))) == {
        "dense_block": numbered("blocks.*", 0, 2, 4),
        "expert_block": numbered("blocks.*", 1, 3, 5),
    }


def test_levels_of_a_u_net() -> None:
    assert kinds(capture(*small("unet", depth=2))) == {
        "level": numbered("down.*", 0, 1),
        "level_2": numbered("up.*", 0, 1),
        "level_3": numbered("up.*", 5, 6),
    }


def test_a_different_block_is_no_instance() -> None:
    model: Any
    model, batch = listed("BertForMaskedLM")
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()
    assert kinds(capture(model, batch)) == {"bert_layer": numbered("bert.encoder.layer.*", 0, 2)}
