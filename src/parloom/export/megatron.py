"""Megatron-LM: a plan's settings as arguments of its training scripts, in a shell script."""

from collections.abc import Iterator, Sequence
from math import ceil

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
    unknown_dtype,
)
from parloom.ir.plan import GLOBAL
from parloom.ir.plan_json import plan_hash
from parloom.ir.stages import item_key
from parloom.rewrite.pad import Padding

FILE = "megatron_args.sh"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""What Megatron-FSDP calls the levels of ZeRO."""
SCHEDULES = frozenset({"1f1b", "interleaved_1f1b", "one_stage"})
MULTIPLE = 128
"""What Megatron-LM pads vocabularies to where it is not told, times the tensor-parallel ranks."""

Flags = Iterator[tuple[str, ...]]


def settings(found: Description) -> Settings:
    """The file for Megatron-LM."""
    flags = (*_degrees(found), *_pipeline(found), *_zero(found), *_batch(found),
             *_recompute(found), *_precision(found), *_vocabulary(found))  # fmt: skip
    missing = tuple(_missing(found))
    # Megatron-LM asks for it where it does not refuse it.
    connections = found.chosen.tensor * found.chosen.context > 1 and found.chosen.zero < 2
    text = rendered(
        FILE,
        hash=plan_hash(found.plan),
        missing=missing,
        flags=flags,
        connections=connections,
        ranks=found.chosen.ranks,
    )
    return Settings(FILE, text, missing)


def _degrees(found: Description) -> Flags:
    own = found.chosen
    yield "--tensor-model-parallel-size", str(own.tensor)
    yield "--pipeline-model-parallel-size", str(own.pipeline)
    yield "--context-parallel-size", str(own.context)
    if own.context > 1:
        yield "--cp-comm-type", "p2p" if own.ring else "allgather"
    if own.sequence_parallel:
        yield ("--sequence-parallel",)
    if own.expert > 1:
        yield "--expert-model-parallel-size", str(own.expert)
        yield "--expert-tensor-parallel-size", "1"


def _pipeline(found: Description) -> Flags:
    counts = found.blocks_of_stages
    if len(counts) == 1:
        return
    if not found.even:
        yield "--pipeline-model-parallel-layout", _layout(counts)
        return
    if found.chosen.interleave > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(found.chosen.interleave)
    if len(set(counts)) > 1:  # one block fewer at both ends
        yield ("--account-for-embedding-in-pipeline-split",)
        yield ("--account-for-loss-in-pipeline-split",)


def _layout(counts: Sequence[int]) -> str:
    """`Et*3|t*4|t*2L`: the embedding, blocks and the loss of each stage."""
    stages = [f"t*{count}" if count else "" for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def _zero(found: Description) -> Flags:
    own = found.chosen
    if not own.zero:
        return
    yield ("--use-distributed-optimizer",)
    if own.zero > 1:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", SHARDING[own.zero]
        yield "--ckpt-format", "fsdp_dtensor"
        yield ("--no-gradient-accumulation-fusion",)
    if own.shard:
        yield "--num-distributed-optimizer-instances", str(own.data // own.shard)
        if own.zero > 1:
            yield "--outer-dp-sharding-strategy", "no_shard"


def _batch(found: Description) -> Flags:
    own = found.chosen
    yield "--micro-batch-size", str(own.microbatch)
    yield "--global-batch-size", str(found.samples)
    if found.positions:
        yield "--seq-length", str(found.positions)
    if found.plan.decisions.batch_semantics == GLOBAL:
        yield ("--calculate-per-token-loss",)


def _first(found: Description) -> int | None:
    """How many blocks each stage recomputes where these are its first ones; None where not."""
    number = dict(zip(found.blocks, found.recompute.whole, strict=True))
    stages = [[number[item] for item in items if item in number] for items in found.stages]
    counts = {sum(own) for own in stages}
    first = all(own == sorted(own, reverse=True) for own in stages)
    return counts.pop() if len(counts) == 1 and first else None


def _recompute(found: Description) -> Flags:
    own, first = found.recompute, _first(found)
    if own.every:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"
    elif any(own.whole):
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block"
        most = ceil(sum(own.whole) / len(found.stages))
        yield "--recompute-num-layers", str(most if first is None else first)
    elif own.some:
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", "core_attn", "layernorm"


def _precision(found: Description) -> Flags:
    own = found.chosen
    if found.dtype == "bfloat16":
        yield ("--bf16",)
        wide = own.reduce_dtype == "float32"
        yield ("--accumulate-allreduce-grads-in-fp32" if wide else "--grad-reduce-in-bf16",)
    elif found.dtype == "float16":
        yield ("--fp16",)
    name = found.plan.optimizer.name.lower()
    yield "--optimizer", "sgd" if name == "sgd" else "adam"


def _multiple(found: Description, padding: Padding) -> int | None:
    """The multiple to which Megatron-LM's padding has as many rows, None where there is none."""
    each, rest = divmod(padding.padded, found.chosen.tensor)
    return each if not rest and ceil(padding.size / padding.padded) == 1 else None


def _vocabulary(found: Description) -> Flags:
    padded = paddings(found)
    wanted = {_multiple(found, padding) for padding in padded}
    (multiple,) = wanted if len(wanted) == 1 else (None,)
    # Without, the vocabulary is padded to more rows than the plan has.
    yield "--make-vocab-size-divisible-by", str(multiple or 1)


def _missing(found: Description) -> Iterator[str]:
    own, decisions = found.chosen, found.plan.decisions
    yield from beyond(found)
    yield from stages_words(found)
    yield from _ends(found)
    if len(found.stages) > 1 and decisions.schedule not in SCHEDULES:
        yield f"schedule {decisions.schedule} (1F1B there)"
    if len({(p.size, p.padded) for p in paddings(found)}) > 1:
        yield from map(padding_words, paddings(found))
    if own.context > 1:
        yield (
            f"one chunk of positions for each of {own.context} context-parallel ranks (two chunks"
            " there, from both ends)"
        )
    yield from experts_words(found)
    if found.recompute.some or (any(found.recompute.whole) and _first(found) is None):
        some = "core attention and layer norms there"
        yield recompute_words(found, some if found.recompute.some else "the first of a stage there")
    yield from unknown_dtype(found)
    if found.dtype in ("bfloat16", "float16") and own.master_dtype is None:
        yield f"no copies of {found.dtype} weights in float32 (the optimizer has some there)"
    if found.dtype == "float16" and own.reduce_dtype is not None:
        yield f"gradients summed in {own.reduce_dtype}"
    if found.plan.optimizer.name.lower() not in ("adam", "adamw", "sgd"):
        yield f"optimizer {found.plan.optimizer.name}"


def _ends(found: Description) -> Iterator[str]:
    """What is before the blocks and not in the first stage, or after them and not in the last."""
    order = {item_key(item): index for index, item in enumerate(found.graph.main.body)}
    blocks = [order[block] for block in found.blocks]
    if len(found.stages) == 1 or not blocks:
        return
    for index, items in enumerate(found.stages):
        astray = [
            item for item in items
            if (order[item] < min(blocks) and index > 0)
            or (order[item] > max(blocks) and index < len(found.stages) - 1)
        ]  # fmt: skip
        if astray:
            yield f"{', '.join(astray)} in stage {index}"
