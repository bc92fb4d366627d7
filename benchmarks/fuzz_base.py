"""The valid files that the fuzz mutates, and those that they need."""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from fuzz_mutations import as_json

from parloom import api
from parloom.cost.calibration import (
    Calibration,
    Fingerprint,
    Product,
    Stream,
    TimedCollective,
    calibration_to_json,
)

MODELS = """
import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).square().mean()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, labels):
        h = F.dropout(torch.relu(self.norm(self.conv(x))).mean((2, 3)), 0.1, self.training)
        return F.cross_entropy(self.head(h), labels)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, h):
        q, k, v = self.qkv(self.norm(h)).view(*h.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(a.transpose(1, 2).reshape(h.shape))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), ids.flatten())


def mlp():
    return Mlp(), {"x": torch.randn(4, 8)}


def wide():
    return Mlp(), {"x": torch.randn(256, 8)}


def conv():
    return Conv(), {"x": torch.randn(4, 3, 6, 6), "labels": torch.randint(4, (4,))}


def tokens():
    return Tokens(), {"ids": torch.randint(16, (4, 6))}


def broken():
    raise RuntimeError("no data here")
"""
TRAIN = "print('trained')\n"

CLUSTERS = {
    "levels": """\
name: lab
device: A100-40GB
backend: nccl
price_per_hour: 1.50USD
host: {memory: 1TiB, devices: 4, bandwidth: 25GB/s}
levels:
  - {name: NVLink3, size: 4, bandwidth: 300GB/s}
  - {name: leaf, size: 8, bandwidth: 25Gbit/s, latency: 5us}
  - {name: spine, size: 2, bandwidth: {up: 25Gbit/s, down: 10Gbit/s}, oversubscription: 2}
""",
    "torus": """\
device:
  name: chip
  memory: 64GiB
  memory_bandwidth: 1.6TB/s
  rates: {bf16: 200TFLOP/s, fp32: 50TFLOP/s}
  price_per_hour: 2.10USD
backend: other
levels:
  - {name: links, torus: [2, 4], bandwidth: 50GB/s, latency: 1us}
  - {name: network, size: 2, bandwidth: 25Gbit/s, latency: 50us}
""",
    "parts": """\
name: mixed
parts:
  - device: H100
    count: 2
    levels: [{name: NVLink4, size: 8, bandwidth: 450GB/s}]
  - device: A100-80GB
    levels: [{name: NVLink3, size: 4, bandwidth: 300GB/s}]
    uplink: {bandwidth: 10GB/s, latency: 8us}
join: {name: InfiniBand, bandwidth: 50GB/s}
""",
    "cpus": "device: cpu\nlevels:\n  - {name: loopback, size: 4, bandwidth: 2GB/s}\n",
}

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
KEYED = {**TEXT, "num_key_value_heads": 2}
GPT = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 8}
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "llama": ("LlamaForCausalLM", KEYED),
    "mistral": ("MistralForCausalLM", KEYED),
    "qwen2": ("Qwen2ForCausalLM", KEYED),
    "gemma": ("GemmaForCausalLM", {**KEYED, "head_dim": 4}),
    "phi": ("PhiForCausalLM", KEYED),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 16, "word_embed_proj_dim": 16,
        },
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "mixtral": ("MixtralForCausalLM", {**KEYED, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", TEXT),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "max_position_embeddings": 18}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {
            "vocab_size": 32, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 4,
            "max_position_embeddings": 16,
        },
    ),
    "electra": ("ElectraForTokenClassification", {**TEXT, "embedding_size": 16}),
    "albert": ("AlbertForQuestionAnswering", {**TEXT, "embedding_size": 8}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
            "num_heads": 4, "n_positions": 16,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "max_position_embeddings": 16, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
        },
    ),
    "vit": ("ViTForImageClassification", IMAGE),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 16,
            "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
            "decoder_start_token_id": 0,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "projection_dim": 8,
            "text_config": {**TEXT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
            "vision_config": IMAGE,
        },
    ),
}  # fmt: skip


def main_base() -> Path:
    """A folder with the base files, made anew."""
    folder = Path(tempfile.mkdtemp(prefix="parloom-fuzz-")) / "base"
    make_base(folder)
    return folder


def make_base(folder: Path) -> None:
    """Valid files of every kind."""
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    for name, text in CLUSTERS.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "calibration.json").write_text(calibration_to_json(measured()), encoding="utf-8")
    for family in FAMILIES:
        (folder / f"{family}.json").write_bytes(as_json(config_of(family)))
    with chdir(folder):
        for name, model, cluster, method in (
            ("mlp", "models.py:mlp", "2xcpu", "data_parallel"),
            ("conv", "models.py:conv", "4xcpu", "fsdp"),
            ("tokens", "models.py:tokens", "4xcpu", "megatron"),
            ("one", "models.py:mlp", "1xcpu", "auto"),
            ("auto", "models.py:tokens", "2xcpu", "auto"),
        ):
            api.save(api.plan(model, cluster=cluster, method=method), folder / f"{name}.plan")
            shutil.move(folder / f"{name}.plan" / "plan.json", folder / f"{name}.plan.json")
            shutil.rmtree(folder / f"{name}.plan")


def config_of(family: str) -> dict[str, Any]:
    """A small configuration of a family of models."""
    architecture, sizes = FAMILIES[family]
    return {"model_type": family, "architectures": [architecture], **sizes}


def measured() -> Calibration:
    """A calibration of four processes on some machine."""
    here = Fingerprint("cpu", "a processor", 2, "Linux", "2.13.0+cpu", "gloo")
    products = tuple(Product("float32", n, n, n, 2e-11 * n**3 + 1e-5) for n in (64, 256, 512))
    streams = tuple(Stream(2**n, 2.0**n * 3e-10 + 1e-5) for n in (16, 20, 24))
    collectives = tuple(
        TimedCollective(kind, ((0, 4),), 2**n, 1e-3 + 2.0**n * 2e-9, 0.5)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for n in (10, 20)
    )
    return Calibration(here, 4, 2e-6, products, streams, (), collectives, 0.05)
