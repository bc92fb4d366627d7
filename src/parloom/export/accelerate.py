"""Accelerate: a plan's settings as the YAML file of `accelerate launch --config_file`.

ZeRO-2 and 3 are FSDP2, with degrees where there are several kinds; ZeRO-1 without other kinds is
its DeepSpeed plugin; plain data parallelism is DDP.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from parloom.errors import one_line
from parloom.execute.startup import devices_of_a_node
from parloom.export.description import Description
from parloom.export.settings import (
    Settings,
    beyond,
    experts_words,
    loss_words,
    padding_words,
    paddings,
    pipeline_words,
    recompute_words,
)

FILE = "accelerate.yaml"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def settings(found: Description) -> Settings:
    """The file for Accelerate."""
    missing = tuple(_missing(found))
    head = ["# Not expressible here:"] * bool(missing) + [f"# - {one_line(m)}" for m in missing]
    text = yaml.safe_dump(_config(found), sort_keys=True)
    return Settings(FILE, "".join(f"{line}\n" for line in head) + text, missing)


def _kind(found: Description) -> str:
    own = found.chosen
    if _ranks(found) == 1:
        return "NO"
    if own.data * own.context > 1 and (own.zero > 1 or own.tensor * own.context > 1):
        return "FSDP"
    if own.zero == 1 and own.data > 1:
        return "DEEPSPEED"
    return "MULTI_CPU" if _on_cpu(found) else "MULTI_GPU"


def _on_cpu(found: Description) -> bool:
    return found.cluster.device.name == "cpu"


def _ranks(found: Description) -> int:
    """Of a pipeline's stage: there are no pipelines."""
    return found.chosen.data * found.chosen.context * found.chosen.tensor


def _config(found: Description) -> dict[str, Any]:
    kind, ranks = _kind(found), _ranks(found)
    size = devices_of_a_node(found.plan) or ranks
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": max(1, ranks // size),
        "num_processes": ranks,
        "mixed_precision": _precision(found),
        "use_cpu": _on_cpu(found),
    }
    if kind == "FSDP":
        document["fsdp_config"] = _fsdp(found)
        document["parallelism_config"] = _degrees(found)
    if kind == "DEEPSPEED":
        document["deepspeed_config"] = {
            "gradient_accumulation_steps": found.chosen.num_microbatches,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero_stage": 1,
        }
    return document


def _precision(found: Description) -> str:
    """Half precision where weights have copies in float32; else the model is cast by its script."""
    wide = found.chosen.master_dtype is not None
    return PRECISIONS.get(found.dtype, "no") if wide else "no"


def _fsdp(found: Description) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if found.blocks else "NO_WRAP",
        "fsdp_reshard_after_forward": found.chosen.zero == 3,
        "fsdp_activation_checkpointing": _recomputes(found),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _degrees(found: Description) -> dict[str, Any]:
    own = found.chosen
    shard = _shard(found)
    degrees: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": own.data // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": own.tensor,
        "parallelism_config_cp_size": own.context,
    }
    if own.context > 1:
        degrees["parallelism_config_cp_comm_strategy"] = "alltoall" if own.ring else "allgather"
    return degrees


def _shard(found: Description) -> int:
    """Over how many data-parallel ranks FSDP divides: all where the plan divides nothing, as
    Accelerate has no copies of tensor-parallel models.
    """
    return found.chosen.shard or found.chosen.data


def _recomputes(found: Description) -> bool:
    return sum(found.recompute.whole) * 2 > len(found.blocks)


def _missing(found: Description) -> Iterator[str]:
    own, kind = found.chosen, _kind(found)
    yield from beyond(found)
    yield from pipeline_words(found)
    yield from map(padding_words, paddings(found))
    if kind == "FSDP" and own.zero < 2 and own.data > 1:
        stored = "ZeRO-1" if own.zero else "weights, gradients and optimizer state stored whole"
        yield f"{stored} beside tensor or context parallelism (ZeRO-2 there)"
    if kind.startswith("MULTI") and own.tensor > 1:
        yield f"tensor parallelism alone over {own.tensor} ranks (ParallelismConfig of a script)"
    if kind == "DEEPSPEED" and own.shard:
        yield f"ZeRO over {own.shard} of {own.data} data-parallel ranks (over all there)"
    if own.num_microbatches > 1 and kind != "DEEPSPEED":
        yield f"{own.num_microbatches} microbatches (gradient_accumulation_steps of Accelerator)"
    if own.tensor > 1:
        yield (
            "which weights are split over tensor-parallel ranks (the tp_plan of the model's class"
            " says there)"
        )
    if own.context > 1:
        yield (
            f"one chunk of positions for each of {own.context} context-parallel ranks (two chunks"
            " there, from both ends)"
        )
    if own.expert > 1:
        yield f"experts over {own.expert} ranks"
    yield from experts_words(found)
    whole = found.recompute.whole
    if found.recompute.some or (any(whole) and not (all(whole) and kind == "FSDP")):
        there = "all blocks there" if kind == "FSDP" and _recomputes(found) else "nothing there"
        yield recompute_words(found, there)
    yield from loss_words(found)
    if found.dtype == "float64":
        yield "weights in float64"
