"""The models of the breadth benchmark: Hugging Face architectures at tiny sizes, and the zoo's.

A Hugging Face model is named by its architecture. Its config is the default one with every size
that the library has a common name for made small; `SIZES` says what else a family needs.
"""

from typing import Any

import torch
import transformers
from tests.zoo_sizes import SMALL
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from parloom import zoo
from parloom.capture.hugging_face import build_from_config

BATCH, SEQ = 8, 16
TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "d_ff": 48,
    "d_kv": 8, "hidden_dim": 48, "ffn_dim": 48, "intermediate_size": 48, "n_inner": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2,
    "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 40, "n_positions": 40, "max_sequence_length": 40,
    "max_source_positions": 16, "max_target_positions": 16, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "embedding_size": 16, "image_size": 32, "patch_size": 8, "projection_dim": 32,
    "num_mel_bins": 8, "decoder_hidden_size": 32, "decoder_intermediate_size": 48,
    "decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 2, "num_labels": 8,
    "state_size": 4, "rotary_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "ffn_hidden_size": 48, "d_embed": 16, "d_head": 8,
    "d_inner": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "sliding_window": 8,
}  # fmt: skip
LATENT = {"head_dim": 4, "num_key_value_heads": 4}  # of latent attention
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16), "conv_stride": (4, 2, 2), "conv_kernel": (8, 4, 4),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "num_feat_extract_layers": 3, "classifier_proj_size": 16, "layerdrop": 0.0,
}  # fmt: skip
SWIN = {"embed_dim": 16, "depths": (1, 4), "num_heads": (2, 4), "window_size": 2, "patch_size": 4}
STAGES = {"hidden_sizes": (16, 32), "depths": (2, 2)}
DEEPSEEK = {
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "SwinForImageClassification": SWIN,
    "Swinv2ForImageClassification": SWIN,
    "ResNetForImageClassification": {"embedding_size": 16, **STAGES},
    "RegNetForImageClassification": {"embedding_size": 16, "groups_width": 8, **STAGES},
    "ConvNextForImageClassification": {"patch_size": 4, "num_stages": 2, **STAGES},
    "ConvNextV2ForImageClassification": {"patch_size": 4, "num_stages": 2, **STAGES},
    "SegformerForSemanticSegmentation": {
        "num_encoder_blocks": 2, "depths": (2, 2), "sr_ratios": (2, 1), "hidden_sizes": (16, 32),
        "patch_sizes": (7, 3), "strides": (4, 2), "num_attention_heads": (2, 4),
        "mlp_ratios": (2, 2), "decoder_hidden_size": 32, "image_size": 32,
    },
    "DPTForSemanticSegmentation": {
        "neck_hidden_sizes": (16, 16, 32, 32), "num_hidden_layers": 4, "fusion_hidden_size": 16,
        "backbone_out_indices": (0, 1, 2, 3), "semantic_loss_ignore_index": 255,
    },
    "BeitForImageClassification": {"use_relative_position_bias": True},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": (1, 2, 3, 4)},
    "BertForQuestionAnswering": {"num_labels": 2},
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "FunnelForMaskedLM": {"block_sizes": (2, 2), "num_decoder_layers": 1},
    "LongformerForMaskedLM": {"attention_window": 8},
    "BigBirdForMaskedLM": {"block_size": 2, "num_random_blocks": 1},
    "Wav2Vec2ForCTC": CONVOLUTIONS,
    "Wav2Vec2ForSequenceClassification": CONVOLUTIONS,
    "HubertForCTC": CONVOLUTIONS,
    "HubertForSequenceClassification": CONVOLUTIONS,
    "WavLMForSequenceClassification": CONVOLUTIONS,
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 48},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "MambaForCausalLM": {"conv_kernel": 4},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "ReformerModelWithLMHead": {
        "is_decoder": True, "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (8, 24),
    },
    "EfficientNetForImageClassification": {
        "hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.5, "image_size": 32,
    },
    "ASTForAudioClassification": {
        "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4,
    },
    "ViTForMaskedImageModeling": {"encoder_stride": 8},
    "DbrxForCausalLM": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "M2M100ForConditionalGeneration": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "Speech2TextForConditionalGeneration": {"input_feat_per_channel": 8, "conv_channels": 16},
    "BambaForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2},
}  # fmt: skip
EXTRA = ("SwitchTransformersForConditionalGeneration",)  # needs a mask where it is traced
LISTED = (
    "BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "ViTForImageClassification",
    "SwinForImageClassification", "ResNetForImageClassification",
)  # fmt: skip
COMMON = (
    "RobertaForMaskedLM", "DistilBertForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM",
    "ElectraForPreTraining", "DebertaForMaskedLM", "DebertaV2ForMaskedLM", "XLMRobertaForMaskedLM",
    "MPNetForMaskedLM", "ModernBertForMaskedLM", "BertForPreTraining",
    "BertForSequenceClassification", "BertForQuestionAnswering", "BertForTokenClassification",
    "OPTForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXForCausalLM",
    "FalconForCausalLM", "BloomForCausalLM", "MptForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "MistralForCausalLM",
    "OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "Starcoder2ForCausalLM",
    "StableLmForCausalLM", "CohereForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "GraniteForCausalLM", "GPTBigCodeForCausalLM", "GptOssForCausalLM", "DbrxForCausalLM",
    "CTRLLMHeadModel", "OpenAIGPTLMHeadModel", "CodeGenForCausalLM", "XGLMForCausalLM",
    "MT5ForConditionalGeneration", "PegasusForConditionalGeneration", "MarianMTModel",
    "MBartForConditionalGeneration", "M2M100ForConditionalGeneration",
    "BlenderbotForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    "UMT5ForConditionalGeneration", "WhisperForConditionalGeneration",
    "Speech2TextForConditionalGeneration", "Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification",
    "HubertForCTC", "HubertForSequenceClassification", "WavLMForSequenceClassification",
    "ASTForAudioClassification", "CLIPModel", "SiglipModel", "DeiTForImageClassification",
    "BeitForImageClassification", "Dinov2ForImageClassification", "ConvNextForImageClassification",
    "ConvNextV2ForImageClassification", "RegNetForImageClassification",
    "EfficientNetForImageClassification", "MobileNetV2ForImageClassification",
    "Swinv2ForImageClassification", "SegformerForSemanticSegmentation",
    "DPTForSemanticSegmentation", "ViTMAEForPreTraining", "ViTForMaskedImageModeling",
    "VideoMAEForVideoClassification", "MambaForCausalLM", "Mamba2ForCausalLM", "RwkvForCausalLM",
    "JambaForCausalLM", "LongformerForMaskedLM", "BigBirdForMaskedLM", "XLNetLMHeadModel",
    "FunnelForMaskedLM", "ReformerModelWithLMHead", "FNetForMaskedLM", "NystromformerForMaskedLM",
)  # fmt: skip


def names(group: str) -> tuple[str, ...]:
    """The models of a group: `listed`, `common`, `zoo`, or all of one of transformers' tasks.

    A task is named as in transformers' mapping: `causal_lm`, `masked_lm`, `image_classification`.
    """
    if group == "zoo":
        return tuple(f"zoo:{name}" for name in zoo.names())
    if group == "listed":
        return LISTED
    if group == "common":
        return (*LISTED, *COMMON)
    task = getattr(modeling_auto, f"MODEL_FOR_{group.upper()}_MAPPING_NAMES", None)
    if task is None:
        return (group,)
    return tuple(dict.fromkeys(n if isinstance(n, str) else n[0] for n in task.values()))


def shrunk(config: Any) -> dict[str, Any]:
    """Small values for all sizes of a config that have a common name, parts included."""
    parts = {
        name: shrunk(kind())
        for name, kind in config.sub_configs.items()
        if hasattr(kind, "model_type") and kind.model_type
    }
    settings = {**config.to_dict(), **{k: getattr(config, k, None) for k in config.attribute_map}}
    own = TINY | LATENT if "kv_lora_rank" in settings else TINY
    kept = {
        key: value
        for key, value in own.items()
        if key in settings and type(settings[key]) in (int, type(None))
    }
    return kept | parts


def tiny(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model in training mode with random weights, and a batch."""
    torch.manual_seed(0)
    if name.startswith("zoo:"):
        return tiny_zoo(name.removeprefix("zoo:"))
    kind = getattr(transformers, name)
    sizes = shrunk(kind.config_class()) | SIZES.get(name, {})
    config = kind.config_class(**sizes)
    config.architectures = [name]
    model, batch = build_from_config(config, BATCH, SEQ)
    if name in EXTRA:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    labels = batch.get("labels")
    if labels is not None and labels.dim() == 2 and "input_ids" in batch:
        labels[:, :2] = -100
        labels[0, :7] = -100
    return model, batch


def tiny_zoo(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A zoo model at the sizes that the tests run it in."""
    return zoo.build(name, batch=BATCH, **SMALL[name])
