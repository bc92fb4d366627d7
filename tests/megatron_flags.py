"""What Megatron-LM makes of the arguments that are written for it."""

import argparse
import shlex

from parloom.export import megatron
from parloom.export.description import describe
from parloom.ir.plan import Plan


def megatron_parser() -> argparse.ArgumentParser:
    """The flags of Megatron-LM's `megatron/training/arguments.py` that settings use, with its
    choices; Megatron-LM's own parser needs more than what PyPI has of it.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    numbers = (
        "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size"
        " expert-model-parallel-size expert-tensor-parallel-size micro-batch-size"
        " global-batch-size seq-length num-virtual-stages-per-pipeline-rank"
        " recompute-num-layers num-distributed-optimizer-instances make-vocab-size-divisible-by"
    )
    switches = (
        "sequence-parallel use-distributed-optimizer use-megatron-fsdp calculate-per-token-loss"
        " account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split bf16 fp16"
        " no-gradient-accumulation-fusion accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16"
        " optimizer-cpu-offload"
    )
    choices = {
        "cp-comm-type": ["p2p", "a2a", "allgather", "a2a+p2p"],
        "recompute-granularity": ["full", "selective"],
        "recompute-method": ["uniform", "block"],
        "data-parallel-sharding-strategy": ["optim", "optim_grads", "optim_grads_params"],
        "outer-dp-sharding-strategy": ["no_shard", "optim"],
        "ckpt-format": ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"],
        "optimizer": ["adam", "sgd"],
    }  # fmt: skip
    for name in numbers.split():
        parser.add_argument(f"--{name}", type=int)
    for name in switches.split():
        parser.add_argument(f"--{name}", action="store_true")
    for name, allowed in choices.items():
        parser.add_argument(f"--{name}", choices=allowed)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--recompute-modules", nargs="*")
    return parser


def megatron_args(plan: Plan) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """What a shell and Megatron-LM's parser make of the file, and what is not in it."""
    found = megatron.settings(describe(plan))
    lexer = shlex.shlex(found.text.partition("PARALLEL_ARGS=(")[2], posix=True)
    lexer.whitespace_split = True
    words = [word for word in lexer if word != ")"]
    return megatron_parser().parse_args(words), found.missing
