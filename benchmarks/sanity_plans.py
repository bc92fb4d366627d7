"""Variants of plans in the sanity benchmark: parallelism, recomputation, schedules, ZeRO, scale."""

from collections.abc import Mapping
from typing import Any

from sanity_bases import (
    ACTIVATIONS,
    KORTHIKANTI,
    SC21,
    STATES,
    TITAN,
    Variant,
    flops,
    pipelined,
    zero_states,
)

ZB = "Qi et al. (arXiv:2401.10241)"
# Of a model that is 6.6 times as large. Its attention computes all scores: as a causal mask over
# twice as many positions.
MEGATRON: Mapping[str, Any] = {
    "layers": 72, "width": 3072, "heads": 32, "per_node": 8, "plan.tensor": 8,
}  # fmt: skip

PLANS = (
    Variant(
        "tensor parallelism x1/2", "tensor", {"per_node": 4, "plan.tensor": 4}, 1 / 0.626,
        1 / 0.70, 1 / 0.55, "products halve over 8; norms do not, all-reduces take 7/6",
        "products 0.19 s, all-reduces 65 ms, what is not divided 43 ms; 15 % each",
    ),
    Variant(
        "tensor parallelism x2, over two nodes", "tensor", {"nodes": 2, "plan.tensor": 16}, 0.80,
        0.68, 0.95, "all-reduces at 160-184 GB/s a node, not 231 GB/s in a node; products halve",
        "100 ms of all-reduces and 93 ms of products, each known to 20 %",
    ),
    Variant(
        "model x7, tensor parallelism x8", "1.2 billion on V100", MEGATRON,
        flops(72, 3072, 2048) / flops(40, 1536, 2048) / 8 / 0.77, 0.96, 1.18,
        "Shoeybi et al. (arXiv:1909.08053), figure 5: 77 % of one device's rate (recalled)",
        "published as measured; 10 %",
    ),
    Variant(
        "sequence parallelism", "22 billion", {"plan.sequence_parallel": True}, 19.0 / 19.6,
        0.93, 1.0, f"{KORTHIKANTI}, table 4: 19.6 to 19.0 ms a layer (recalled)",
        "published as measured; 4 %",
    ),
    Variant(
        "full recomputation", "22 billion", {"plan.recompute": "full"}, 27.2 / 19.6, 1.30, 1.42,
        f"{KORTHIKANTI}, table 4: 19.6 to 27.2 ms a layer (recalled); 4/3 of the products",
        "from 4/3 without all-reduces to the published one",
    ),
    Variant(
        "scores recomputed", "22 billion", {"software.keeps_scores": False}, 20.9 / 19.6,
        1.03, 1.10, f"{KORTHIKANTI}, table 4: 19.6 to 20.9 ms a layer (recalled)",
        "published as measured; 4 %",
    ),
    Variant(
        "full recomputation to scores and sequence parallelism", "22 billion, recomputed",
        {"plan.recompute": "none", "software.keeps_scores": False, "plan.sequence_parallel": True},
        1.10 / 1.42, 0.73, 0.82, f"{KORTHIKANTI}, table 5: 1.42 to 1.10 s (recalled)",
        "published as measured; 5 %",
    ),
    Variant(
        "activations, sequence parallelism", "22 billion", {"plan.sequence_parallel": True},
        (34 + 5 * 64 / 3) / 8 / (10 + 24 / 8 + 5 * 64 / 3 / 8), 0.63, 0.70,
        f"{KORTHIKANTI}, equations 2 and 4: (34 + 5 a s / w) / t for 10 + 24 / t + 5 a s / (w t)",
        "exact in its terms; 5 % for embedding and loss", ACTIVATIONS,
    ),
    Variant(
        "activations, scores recomputed", "22 billion, sequence parallel",
        {"software.keeps_scores": False}, 34 / (34 + 5 * 64 / 3), 0.23, 0.29,
        f"{KORTHIKANTI}, equation 6: 34 / t for (34 + 5 a s / w) / t",
        "at the peak one layer has its scores again: 2 % of the base", ACTIVATIONS,
    ),
    Variant(
        "activations, full recomputation", "22 billion", {"plan.recompute": "full"},
        2 / (10 + 24 / 8 + 5 * 64 / 3 / 8), 0.07, 0.13,
        f"{KORTHIKANTI}, section 5: 2 s b w a layer",
        "at the peak one layer has all of its activations: 2 %; embedding and loss", ACTIVATIONS,
    ),
    Variant(
        "context parallelism x2", "one H100, 16k",
        {"per_node": 2, "plan.context": 2, "plan.striped": True}, 0.5, 0.50, 0.58,
        "work halves; keys and values of 134 MB a layer travel three times: 0.5 of 19 ms",
        "gathers may or may not overlap; the optimizer does not halve",
    ),
    Variant(
        "striped positions", "context, chunks", {"plan.striped": True}, 0.79, 0.74, 0.85,
        "causal attention of the last of 2 ranks: 3/4 of all without stripes, 1/2 with them",
        "attention is 0.45-0.59 of the time of one device",
    ),
    Variant(
        "ring for gathers of keys and values", "context, chunks", {"plan.ring": True}, 1.0,
        0.93, 1.03, "the same bytes, overlapped", "gathers are 2-5 % of the step",
    ),
    Variant(
        "microbatches x2, pipeline", "pipeline", {"plan.num_microbatches": 16},
        pipelined(16, 8) / pipelined(8, 8), 1.49, 1.58, f"{SC21}, section 2.2: m + p - 1",
        "the head makes the last stage up to 7 % longer; the optimizer does not double",
    ),
    Variant(
        "microbatches x1/4, pipeline, ZeRO-1", "pipeline, ZeRO-1", {"plan.num_microbatches": 8},
        pipelined(8, 8) / pipelined(32, 8), 0.38, 0.42, f"{SC21}, section 2.2: m + p - 1",
        "gradients are reduced once after the pipeline, in up to 2 passes of a microbatch",
    ),
    Variant(
        "interleaving", "pipeline", {"plan.interleave": 2}, pipelined(8, 8, 2) / pipelined(8, 8),
        0.75, 0.83, f"{SC21}, section 2.2: m + (p - 1) / v",
        "twice the sends, the longer last stage",
    ),
    Variant(
        "pipeline stages x2", "pipeline, 4 stages", {"nodes": 8, "plan.pipeline": 8},
        pipelined(8, 8) / pipelined(8, 4) / 2, 0.66, 0.73, f"{SC21}, section 2.2: (m + p - 1) / p",
        "the head weighs twice as much in a shorter stage",
    ),
    Variant(
        "microbatch x2, microbatches x1/2, pipeline", "pipeline, 16 microbatches",
        {"plan.microbatch": 2, "plan.num_microbatches": 8},
        2 * pipelined(8, 8) / pipelined(16, 8), 1.15, 1.32, f"{SC21}, equation 1 and figure 7",
        "larger products gain 0-12 %",
    ),
    Variant(
        "devices x2 at constant batch, GPT-3", "GPT-3",
        {"nodes": 96, "plan.data": 8, "plan.num_microbatches": 192}, 0.5 * 153 / 149, 0.50, 0.53,
        f"{SC21}, table 2: 153 and 149 TFLOP/s (recalled); m + p - 1 gives 0.514", "agree",
    ),
    Variant(
        "devices x2 at constant batch, ZeRO-3", "GPT-3, sharded",
        {"nodes": 192, "plan.data": 1536, "plan.microbatch": 1}, 0.5 * 88 / 44, 0.85, 1.15,
        f"{SC21}, table 2: ZeRO-3, 88 and 44 TFLOP/s (recalled)", "published as measured; 15 %",
        cause="gathers get 8 adapters of a node; with the bandwidth of one the ratio is 1.04",
    ),
    Variant(
        "devices x2 at constant batch, ZeRO-3, 384", "GPT-3, sharded, 384",
        {"nodes": 96, "plan.data": 768, "plan.microbatch": 2}, 0.5 * 144 / 88, 0.70, 0.94,
        f"{SC21}, table 2: ZeRO-3, 144 and 88 TFLOP/s (recalled)", "published as measured; 15 %",
        cause="gathers get 8 adapters of a node, as with 1,536 devices",
    ),
    Variant(
        "devices x2 at constant batch, data parallelism", "data, not overlapped",
        {"nodes": 16, "plan.data": 128, "plan.microbatch": 2}, 0.58, 0.52, 0.64,
        "work halves; all-reduce and optimizer, 0.07 of 0.41 s, do not", "15 % each",
    ),
    Variant(
        "16 times the devices at constant work each, data parallelism", "data",
        {"nodes": 128, "plan.data": 1024}, 1.02, 1.0, 1.06,
        "ring: 2 (n - 1) / n of the bytes; the slowest of 1,024 devices is 1.5 % slower",
        "tree latencies grow with log n",
    ),
    Variant(
        "16 times the devices at constant work each, ZeRO-3", "sharded, 64",
        {"nodes": 128, "plan.data": 1024}, 1.07, 1.0, 1.20,
        "Zhao et al. (arXiv:2304.11277), section 5.4: 7 % from 8 to 512 devices (recalled)",
        "ring latencies grow with n; links are half of computing here",
        cause="1,023 latencies a gather; 1.13 with 4 samples a device, which compute for longer",
    ),
    Variant(
        "64 times the devices at constant work each, ZeRO-3", "11 billion, sharded",
        {"nodes": 64, "plan.data": 512}, 1 / 0.93, 1.0, 1.15,
        "Zhao et al. (arXiv:2304.11277), section 5.4: 7 % from 8 to 512 devices (recalled)",
        "published of T5-11B; twice the loss for the other model",
    ),
    Variant(
        "16 times the devices at constant work each, torchtitan", "Llama 8B",
        {"nodes": 16, "plan.data": 128}, 6667 / 6514, 1.0, 1.05,
        f"{TITAN}: 6,667 and 6,514 tokens/s", "published as measured; 2.5 %",
    ),
)  # fmt: skip

SCHEDULES = (
    Variant(
        "GPipe", "pipeline, 16 microbatches", {"plan.schedule": "gpipe"}, 1.0, 0.98, 1.02,
        f"{SC21}, section 2.2: the same bubble, p - 1", "sends wait at other places",
    ),
    Variant(
        "activations, GPipe", "pipeline, 16 microbatches", {"plan.schedule": "gpipe"}, 2.0,
        1.9, 2.05, f"{SC21}, section 2.2: m microbatches in flight, not p",
        "exact; the loss is of one microbatch", ACTIVATIONS,
        cause="of the form: the last stage holds the logits of all microbatches, too; others 1.99",
    ),
    Variant(
        "activations, interleaving", "pipeline, 16 microbatches", {"plan.interleave": 2},
        1 + 7 / (8 * 2), 1.38, 1.50, f"{KORTHIKANTI}, section 4.2.3: 1 + (p - 1) / (p v)",
        "exact; 4 % for both ends",
        ACTIVATIONS,
    ),
    Variant(
        "ZB-H1", "pipeline, 16 microbatches", {"plan.schedule": "zb_h1"},
        (16 * 3 + 7 * 1) / (3 * pipelined(16, 8)), 0.79, 0.86,
        f"{ZB}, table 2: (p - 1) (F + B - W) for (p - 1) (F + B + W)",
        "all-reduces make F and B up to 1.25 times as long as W",
    ),
    Variant(
        "ZB-H2, steps that follow each other", "pipeline, 16 microbatches",
        {"plan.schedule": "zb_h2", "plan.synchronizes": False}, 16 / pipelined(16, 8), 0.68, 0.80,
        f"{ZB}, table 2: (p - 1) (F + B - 2 W) for (p - 1) (F + B + W)",
        "all-reduces make F and B up to 1.25 times as long as W; the longer last stage",
        cause="tied embeddings: the last stage updates when the first has their gradient, too; 0.74"
        " without",
    ),
    Variant(
        "activations, ZB-H1", "pipeline, 16 microbatches", {"plan.schedule": "zb_h1"}, 1.0, 0.95,
        1.15, f"{ZB}, table 2: p M_B for both", "up to 1/8: what W waits for is held longer",
        ACTIVATIONS,
    ),
)  # fmt: skip

ZERO = (
    *(
        Variant(
            f"ZeRO-{level}, states", "replicated, 64, accumulated", {"plan.zero": level},
            zero_states(level, 64) / 16, 0.97 * zero_states(level, 64) / 16,
            1.03 * zero_states(level, 64) / 16,
            "ZeRO (Rajbhandari et al., SC'20), figure 1: 2 + 2 + 12 bytes a parameter",
            "exact; 3 % for parts that do not divide", STATES,
        )
        for level in (1, 2, 3)
    ),
    Variant(
        "ZeRO-1, states, one microbatch", "replicated, 64", {"plan.zero": 1},
        zero_states(1, 64) / 16, 0.97 * zero_states(1, 64) / 16, 1.03 * zero_states(1, 64) / 16,
        "ZeRO (Rajbhandari et al., SC'20), figure 1: 2 + 2 + 12 bytes a parameter",
        "exact; 3 % for parts that do not divide", STATES,
        cause="gradients are scattered as they come; Megatron-LM and DeepSpeed keep them whole",
    ),
    Variant(
        "ZeRO-1 for data parallelism", "replicated, 64, slow network", {"plan.zero": 1}, 0.79,
        0.68, 0.95, "ZeRO (SC'20), section 7.2: the same bytes; an update of 1/64",
        "the update of all is 75-105 ms of 0.4 s; gathers after it are not overlapped",
    ),
    Variant(
        "ZeRO-3 for ZeRO-1", "ZeRO-1, 64, slow network", {"plan.zero": 3}, 1.24, 1.10, 1.50,
        "ZeRO (SC'20), section 7.2: 1.5 times the bytes", "upper end: nothing but links",
        cause="ZeRO-1 travels in small buckets, of parloom's runtime; 1.25 in buckets of a block",
    ),
    Variant(
        "batch x2 by microbatches x2, ZeRO-3", "sharded, 64, slow network",
        {"plan.num_microbatches": 2}, 2.0, 1.85, 2.02,
        "weights are gathered and gradients scattered in every microbatch", "the optimizer: 3 %",
    ),
    Variant(
        "batch x2 by microbatch x2, ZeRO-3", "sharded, 64, slow network", {"plan.microbatch": 2},
        1.05, 1.0, 1.25, "the same bytes, which take twice as long as computing did",
        "computing of 0.34 s against links of 0.38 s",
    ),
    Variant(
        "shard group of a node (HSDP)", "sharded, 64, slow network", {"plan.shard": 8}, 0.80,
        0.65, 0.90,
        "backward: an all-reduce of 1/8, 2 P bytes a node, for 2 P; forward: none for P",
        "from 2/3, nothing but links, to all of forward hidden before, too",
    ),
    Variant(
        "shard group of a node (HSDP), states", "sharded, 64", {"plan.shard": 8}, 8.0, 7.8, 8.2,
        "16 bytes a parameter over 8, not 64", "exact; 2.5 % for parts that do not divide", STATES,
    ),
)  # fmt: skip
