"""What the sanity benchmark varies: training runs as plain data, and closed forms of their times.

A base is a run of a decoder on a cluster of the device table. A variant changes one thing of it, or
what has to change with that one thing (devices with the ranks that are on them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from parloom.comparators.configuration import Configuration
from parloom.cost.kernels import TENSOR
from parloom.cost.software import GENERATIONS, Software

STEP, STATES, ACTIVATIONS = "step", "states", "activations"
MEASURES = (STEP, STATES, ACTIVATIONS)
# Publications that several variants are from.
SC21 = "Narayanan et al., SC'21"
KORTHIKANTI = "Korthikanti et al. (arXiv:2205.05198)"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"


@dataclass(frozen=True, slots=True)
class Setup:
    """A training run: model, devices and how they differ from the device table's, plan, kernels.

    `inner` and `outer` multiply the bandwidth inside a node and between nodes, `latency` the
    latency of every link. `groups` of key heads: 0 is a GPT, otherwise a Llama. Attention and the
    residual path have dropout where the model `drops`.
    """

    layers: int = 24
    width: int = 2048
    heads: int = 16
    seq: int = 2048
    vocab: int = 51200
    feed_forward: int = 0
    groups: int = 0
    drops: bool = False
    dtype: str = "bfloat16"
    device: str = "A100"
    nodes: int = 1
    per_node: int = 1
    inner: float = 1.0
    outer: float = 1.0
    latency: float = 1.0
    plan: Configuration = field(default_factory=Configuration)
    software: Software = GENERATIONS["fused"]
    product_dtype: str | None = None
    scaling: str = TENSOR


@dataclass(frozen=True, slots=True)
class Variant:
    """A ratio of the variant's measure to the base's, and where it has to lie.

    `theory` is the closed form's or the publication's ratio; `low` to `high` is what it allows,
    for the `reason` given. `source` is a formula or a publication; those not at hand when the
    interval was set are marked as recalled. `cause`: why the prediction lies outside, as far as is
    known.
    """

    name: str
    base: str
    change: Mapping[str, Any]
    theory: float
    low: float
    high: float
    source: str
    reason: str
    measure: str = STEP
    cause: str = ""


def changed(base: Setup, change: Mapping[str, Any]) -> Setup:
    """A base with some fields replaced; `plan.tensor` is a field of its plan."""
    for name, value in change.items():
        outer, _, inner = name.partition(".")
        if inner:
            value = replace(getattr(base, outer), **{inner: value})
        base = replace(base, **{outer: value})
    return base


def flops(layers: int, width: int, seq: int, vocab: int = 51200) -> float:
    """Forward FLOPs of a token: 24 w^2 of products and 2 s w of causal attention a layer, the head.

    Narayanan et al., SC'21, section 5.1, with attention halved by its mask.
    """
    return layers * (24.0 * width**2 + 2.0 * seq * width) + 2.0 * width * vocab


def seconds(
    products: float, attention: float, seq: int, layers: int = 24, width: int = 2048
) -> float:
    """Forward and backward seconds of a token by two rates in FLOP/s, without anything else.

    The backward pass of products is 2 of the forward one, that of attention 2.5 (it multiplies
    scores again: Dao, arXiv:2307.08691, section 3.1.2).
    """
    scores = layers * 2.0 * seq * width
    return 3 * (flops(layers, width, seq) - scores) / products + 3.5 * scores / attention


def pipelined(microbatches: int, ranks: int, chunks: int = 1) -> float:
    """Time of 1F1B in passes of a microbatch: Narayanan et al., SC'21, section 2.2."""
    return microbatches + (ranks - 1) / chunks


def zero_states(level: int, ranks: int) -> float:
    """Bytes per parameter with 16-bit weights and Adam: ZeRO (SC'20), figure 1."""
    weights, gradients, optimizer = 2.0, 2.0, 12.0
    sharded = (optimizer, gradients, weights)[:level]
    return weights + gradients + optimizer - sum(sharded) * (1 - 1 / ranks)


# Products and attention with 2,048, 4,096, ... keys on A100 and H100, in TFLOP/s. Products: 8,192^3
# of random numbers on A100 reaches 258 (thonking.ai, "Strangely, matrix multiplications on GPUs run
# faster when given predictable data"), less in long runs; on H100 620 to 720 (recalled).
# FlashAttention-2 on A100, causal, both passes (arXiv:2307.08691, figures 5 and 6; recalled), on
# H100 and FlashAttention-3 forward and backward (arXiv:2407.08608, figures 5 and 6).
A100, H100 = 230.0, 650.0
FLASH2_A100 = MappingProxyType({2048: 155.0, 4096: 173.0, 8192: 182.0})
FLASH2_A100_64 = MappingProxyType({8192: 165.0})
FLASH2_H100, CUDNN_H100, FLASH3_H100 = 325.0, 525.0, 575.0

ONE = Setup(plan=Configuration(microbatch=4, num_microbatches=4))
LONG = changed(ONE, {"seq": 8192, "plan.microbatch": 1})
LONGER = changed(LONG, {"seq": 16384, "device": "H100", "plan.num_microbatches": 2})
# Without FlashAttention, its authors' model runs attention operation by operation (flash-attn,
# modules/mha.py, SelfAttention).
_UNFUSED = {"software.attention": "scores", "software.merges": ""}
# Data parallelism over 64 devices, every device a microbatch.
DATA = changed(ONE, {"nodes": 8, "per_node": 8, "plan.data": 64, "plan.num_microbatches": 1})
# 6.7 billion parameters, sharded (FSDP): gathers take half of the time of computing.
SEVEN = Setup(
    32, 4096, 32, device="H100", per_node=8, plan=Configuration(data=8, zero=3),
    software=GENERATIONS["compiled"],
)  # fmt: skip
# The tensor-parallel model and plan of Korthikanti et al. (arXiv:2205.05198), table 3, 22B.
LAYERED = Setup(
    48, 6144, 64, drops=True, per_node=8, plan=Configuration(tensor=8, microbatch=4),
    software=GENERATIONS["megatron"],
)  # fmt: skip
PIPELINE = Setup(
    64, 8192, 64, nodes=8, per_node=8,
    plan=Configuration(tensor=8, pipeline=8, num_microbatches=8, sequence_parallel=True),
)  # fmt: skip
# GPT-3 (Narayanan et al., SC'21, table 2): 384 devices, 1,536 samples, Megatron-LM's dropout.
GPT3 = Setup(
    96, 12288, 96, drops=True, nodes=48, per_node=8,
    plan=Configuration(tensor=8, pipeline=12, data=4, num_microbatches=384, recompute="full"),
    software=GENERATIONS["megatron"],
)  # fmt: skip
# 8 billion parameters on H100s with 2.4 TB/s (torchtitan,
# benchmarks/llama3_h100_202412_torchtitan.md).
LLAMA = Setup(
    32, 4096, 32, 8192, 128256, 14336, 8, device="H100-96GB", per_node=8,
    plan=Configuration(data=8, zero=3, microbatch=2, recompute="alternate", reduce_dtype="float32"),
    software=GENERATIONS["compiled"],
)  # fmt: skip
# 7 billion parameters (llm-foundry, scripts/train/benchmarking/README.md).
FOUNDRY = Setup(
    32, 4096, 32, vocab=50432, per_node=8, plan=Configuration(data=8, zero=3, microbatch=6),
    software=GENERATIONS["eager 2023"],
)  # fmt: skip
_SHARDED_GPT3 = {
    "nodes": 96, "plan.tensor": 1, "plan.pipeline": 1, "plan.data": 768, "plan.zero": 3,
    "plan.microbatch": 2, "plan.num_microbatches": 1, "software.overlaps": True,
}  # fmt: skip

BASES: Mapping[str, Setup] = MappingProxyType(
    {
        "one device": ONE,
        "one device, 8k": LONG,
        "one H100, 16k": LONGER,
        "one device, scores": changed(ONE, _UNFUSED),
        "one device, 8k, scores": changed(LONG, _UNFUSED),
        "one device, 8k, flash1": changed(LONG, {"software.attention": "flash1"}),
        "one device, scores and dropout": changed(
            ONE, {"drops": True, "software": GENERATIONS["megatron"], "plan.num_microbatches": 1}
        ),
        "data": DATA,
        "data, not overlapped": changed(DATA, {"software.overlaps": False}),
        "sharded": SEVEN,
        "sharded, 64": changed(SEVEN, {"nodes": 8, "plan.data": 64}),
        "sharded, 64, slow network": changed(SEVEN, {"nodes": 8, "plan.data": 64, "outer": 0.25}),
        "replicated, 64": changed(SEVEN, {"nodes": 8, "plan.data": 64, "plan.zero": 0}),
        # Gradients are kept from one microbatch to the next.
        "replicated, 64, accumulated": changed(
            SEVEN,
            {"nodes": 8, "plan.data": 64, "plan.zero": 0, "plan.num_microbatches": 2},
        ),
        "replicated, 64, slow network": changed(
            SEVEN, {"nodes": 8, "plan.data": 64, "plan.zero": 0, "outer": 0.25}
        ),
        "ZeRO-1, 64, slow network": changed(
            SEVEN, {"nodes": 8, "plan.data": 64, "plan.zero": 1, "outer": 0.25}
        ),
        "11 billion, sharded": Setup(
            35, 5120, 40, 512, per_node=8, plan=Configuration(data=8, zero=3, microbatch=8),
            software=GENERATIONS["eager"],
        ),
        "tensor": Setup(
            32, 4096, 32, per_node=8,
            plan=Configuration(tensor=8, microbatch=4, num_microbatches=4),
        ),
        "tensor, small": Setup(
            24, 1024, 16, 128, per_node=8, plan=Configuration(tensor=8, num_microbatches=4)
        ),
        "1.2 billion on V100": Setup(
            40, 1536, 16, 1024, dtype="float16", device="V100-SXM3",
            plan=Configuration(microbatch=8), software=GENERATIONS["megatron"],
        ),
        "22 billion": LAYERED,
        "22 billion, sequence parallel": changed(LAYERED, {"plan.sequence_parallel": True}),
        "22 billion, recomputed": changed(LAYERED, {"plan.recompute": "full"}),
        "context, chunks": changed(LONGER, {"per_node": 2, "plan.context": 2}),
        "pipeline": PIPELINE,
        "pipeline, 4 stages": changed(PIPELINE, {"nodes": 4, "plan.pipeline": 4}),
        "pipeline, 16 microbatches": changed(PIPELINE, {"plan.num_microbatches": 16}),
        "pipeline, ZeRO-1": changed(
            PIPELINE,
            {
                "nodes": 32, "plan.data": 4, "plan.zero": 1, "plan.num_microbatches": 32,
                "software": GENERATIONS["megatron"],
            },
        ),
        "GPT-3": GPT3,
        "GPT-3, sharded": changed(GPT3, _SHARDED_GPT3),
        "GPT-3, sharded, 384": changed(
            GPT3, {**_SHARDED_GPT3, "nodes": 48, "plan.data": 384, "plan.microbatch": 4}
        ),
        "Llama 8B": LLAMA,
        "Llama 8B, eager": changed(LLAMA, {"software": GENERATIONS["eager"]}),
        "Llama 8B, float8": changed(LLAMA, {"product_dtype": "float8"}),
        "Llama 8B, engine": changed(
            LLAMA, {"software": GENERATIONS["engine"], "plan.zero": 1, "plan.recompute": "none",
                    "plan.microbatch": 1, "plan.num_microbatches": 4, "device": "H100"},
        ),
        "Llama 8B on B200": changed(
            LLAMA, {"software": GENERATIONS["engine"], "plan.zero": 1, "plan.recompute": "none",
                    "plan.microbatch": 2, "plan.num_microbatches": 8, "device": "B200",
                    "product_dtype": "float8"},
        ),
        "7 billion, llm-foundry": FOUNDRY,
        "7 billion, llm-foundry, 4k": changed(
            FOUNDRY, {"seq": 4096, "plan.microbatch": 4, "plan.recompute": "full"}
        ),
    }
)  # fmt: skip
