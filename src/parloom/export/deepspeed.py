"""DeepSpeed 0.19: a plan's settings as its JSON configuration (`ds_config`)."""

import json
from collections.abc import Iterator
from typing import Any

from parloom.export.description import Description
from parloom.export.settings import (
    Settings,
    beyond,
    loss_words,
    padding_words,
    paddings,
    pipeline_words,
    recompute_words,
    unknown_dtype,
)

FILE = "ds_config.json"


def settings(found: Description) -> Settings:
    """The file for DeepSpeed."""
    text = json.dumps(_config(found), indent=2) + "\n"
    return Settings(FILE, text, tuple(_missing(found)))


def _config(found: Description) -> dict[str, Any]:
    """What the file says."""
    own, half = found.chosen, found.dtype in ("bfloat16", "float16")
    zero: dict[str, Any] = {"stage": own.zero}
    if own.zero == 3:
        zero["stage3_param_persistence_threshold"] = 0  # else small weights stay whole
        if own.shard:
            zero["zero_hpz_partition_size"] = own.shard
    document: dict[str, Any] = {
        "train_batch_size": own.data * own.microbatch * own.num_microbatches,
        "train_micro_batch_size_per_gpu": own.microbatch,
        "gradient_accumulation_steps": own.num_microbatches,
        "zero_optimization": zero,
    }
    if found.dtype == "bfloat16":
        document["bf16"] = {"enabled": True}
    if found.dtype == "float16":
        document["fp16"] = {"enabled": True}
    if half and own.reduce_dtype == "float32":
        document["communication_data_type"] = "fp32"
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    if own.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": own.tensor}
    return document


def _missing(found: Description) -> Iterator[str]:
    """What DeepSpeed's configuration cannot hold."""
    own = found.chosen
    yield from beyond(found)
    yield from pipeline_words(found)
    yield from map(padding_words, paddings(found))
    if own.shard and own.zero == 3:
        yield (
            f"gradients and optimizer state divided over {own.shard} of {own.data} data-parallel"
            " ranks (over all there; weights over so many)"
        )
    elif own.shard:
        yield f"ZeRO over {own.shard} of {own.data} data-parallel ranks (over all there)"
    if own.tensor > 1:
        yield (
            "which weights are split over tensor-parallel ranks (AutoTP finds them from the names"
            " of modules)"
        )
    if own.sequence_parallel:
        yield "positions between products split over tensor-parallel ranks (sequence parallelism)"
    if own.context > 1:
        yield f"context parallelism over {own.context} ranks"
    if own.expert > 1:
        yield f"experts over {own.expert} ranks (an argument of deepspeed.moe.layer.MoE)"
    if any(found.recompute.whole) or found.recompute.some:
        yield recompute_words(found, "the model calls deepspeed.checkpointing there")
    yield from loss_words(found)
    yield from unknown_dtype(found)
    if found.dtype in ("bfloat16", "float16") and own.master_dtype is None:
        yield f"no copies of {found.dtype} weights in float32 (the optimizer has some there)"
