"""torchtitan 0.3: a function that gives a `Trainer.Config` a plan's settings.

Since 0.3 a configuration of torchtitan is made by a Python function (`--module`, `--config`) and
no longer by a TOML file.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from parloom.export.description import Description
from parloom.export.rendered import rendered
from parloom.export.settings import (
    Settings,
    beyond,
    experts_words,
    padding_words,
    paddings,
    recompute_words,
    stages_words,
)
from parloom.ir.plan import GLOBAL
from parloom.ir.plan_json import numbers_text, plan_hash

FILE = "torchtitan_settings.py"
SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved_1f1b": "Interleaved1F1B",
        "zb_v": "ZBVZeroBubble",
    }
)
"""torch.distributed.pipelining's names."""
OPTIMIZERS = frozenset({"adam", "adamw"})


def settings(found: Description) -> Settings:
    """The file for torchtitan."""
    text = rendered(
        FILE,
        hash=plan_hash(found.plan),
        missing=(missing := tuple(_missing(found))),
        parallelism=_parallelism(found),
        training=_training(found),
        recompute=_recompute(found),
    )
    return Settings(FILE, text, missing)


def _parallelism(found: Description) -> dict[str, Any]:
    own = found.chosen
    shard = (own.shard or own.data) if own.zero else 1
    values: dict[str, Any] = {
        "data_parallel_replicate_degree": own.data // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if own.zero == 3 else "never",
        "tensor_parallel_degree": own.tensor,
        "enable_sequence_parallel": own.sequence_parallel,
        "context_parallel_degree": own.context,
        "context_parallel_load_balancer": None,
        "expert_parallel_degree": own.expert,
        "pipeline_parallel_degree": own.pipeline,
    }
    if len(found.stages) > 1:
        values |= {
            "pipeline_parallel_schedule": SCHEDULES.get(found.plan.decisions.schedule, "1F1B"),
            "pipeline_parallel_microbatch_size": own.microbatch,
            "module_fqns_per_model_part": [list(_modules(items)) for items in found.stages],
        }
    return values


def _modules(items: tuple[str, ...]) -> Iterator[str]:
    """The modules of a stage: of operators outside of modules there are none."""
    yield from dict.fromkeys(item.partition(":")[0] for item in items if item.partition(":")[0])


def _torn(found: Description) -> Iterator[str]:
    """Modules that lie in several stages."""
    holders: dict[str, list[int]] = {}
    for index, items in enumerate(found.stages):
        for module in _modules(items):
            holders.setdefault(module, []).append(index)
    for module, stages in holders.items():
        if len(stages) > 1:
            yield f"{module} in stages {numbers_text(stages)}"


def _training(found: Description) -> dict[str, Any]:
    own = found.chosen
    in_pipeline = own.num_microbatches if len(found.stages) > 1 else 1
    half = found.dtype == "bfloat16"
    values: dict[str, Any] = {
        "local_batch_size": own.microbatch * in_pipeline,
        "global_batch_size": found.samples,
        "dtype": "bfloat16" if half and own.master_dtype is None else "float32",
        "mixed_precision_param": "bfloat16" if half else "float32",
        "mixed_precision_reduce": "float32",
    }
    if found.positions:
        values["seq_len"] = found.positions
    if own.pipeline > 1:
        values["disable_cuda_graphs"] = True  # torchtitan asks for it
    return values


def _recompute(found: Description) -> str:
    own = found.recompute
    if own.some:
        return "SelectiveAC"
    return "FullAC" if sum(own.whole) * 2 > len(own.whole) else ""


def _missing(found: Description) -> Iterator[str]:
    own, decisions = found.chosen, found.plan.decisions
    yield from beyond(found)
    yield from stages_words(found)
    yield from _torn(found)
    yield from map(padding_words, paddings(found))
    if len(found.stages) > 1 and decisions.schedule not in SCHEDULES:
        yield f"schedule {decisions.schedule} (1F1B there)"
    if own.zero == 1:
        yield "ZeRO-1 (gradients are divided there, too: ZeRO-2)"
    if own.ring and own.context > 1:
        yield "blocks of keys and values that go around a ring (they are gathered there)"
    yield from experts_words(found)
    if (any(own_blocks := found.recompute.whole) and not all(own_blocks)) or found.recompute.some:
        kind = _recompute(found)
        there = {
            "SelectiveAC": "SelectiveAC there: all but products, and every other product",
            "FullAC": "all blocks there",
            "": "nothing there",
        }[kind]
        yield recompute_words(found, there)
    if found.dtype not in ("float32", "bfloat16"):
        yield f"weights in {found.dtype}"
    if found.dtype == "bfloat16" and own.reduce_dtype is None:
        yield "gradients summed in bfloat16 (in float32 there)"
    if decisions.batch_semantics != GLOBAL and own.num_microbatches > 1:
        yield "the mean of the losses of microbatches (one loss over the whole batch there)"
    if found.plan.optimizer.name.lower() not in OPTIMIZERS:
        yield f"optimizer {found.plan.optimizer.name}"
