"""Generations of training software: what a prediction has to know of the kernels that are run.

A prediction is made for an entry of `GENERATIONS`, chosen by what is known of a run (framework,
year, flags), never by its model or its time. `Software` values with other fields are welcome where
more is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from parloom.cost.attention import NAMES, SCORES
from parloom.cost.framework_memory import OWN as OWN_MEMORY
from parloom.cost.framework_memory import FrameworkMemory
from parloom.errors import InputError, nearest

ELEMENTWISE, ROWS = "elementwise", "rows"
MERGES = ("", ELEMENTWISE, ROWS)


@dataclass(frozen=True, slots=True)
class Software:
    """How operators become kernels, and which communication goes on beside them.

    `attention`: one kernel of `cost.attention`, which keeps its scores on the chip and skips what a
    causal mask hides; with SCORES these go through memory, and unless it `keeps_scores` are
    computed again in the backward pass. `merges`: chains of elementwise operators are one kernel
    each (ELEMENTWISE), or with reductions of rows and norms (ROWS), or no operators are ("").
    `fuses_loss`: a cross-entropy reads 16-bit logits, and makes their gradient of them.
    `fused_optimizer`: the update is one pass over memory. `clips`: gradients are clipped by their
    norm.

    `overlaps`: gradients are reduced beside the backward pass, not after it; `overlaps_gathers`:
    updated weights are gathered beside the forward pass of the next step. Both travel in buckets of
    the larger of two numbers of elements, `bucket_elements`, the second for each rank that shares
    them; (0, 0) are those of parloom's runtime. `hides_moves`: products are cut so that collectives
    on their operands and results go on beside them (asynchronous tensor parallelism). `stacks`:
    what a collective gathers or scatters goes through a stacked copy; otherwise tensors lie so that
    it need not.

    `gathers_again`: products keep their part of what was gathered for them, and gather it again in
    the backward pass, beside the first of its products. `fuses_casts`: kernels write operands of
    8-bit products as these read them. `stops_early`: a recomputed block runs up to the last
    operator that saves a tensor (non-reentrant checkpoints of PyTorch), otherwise to its end
    (reentrant ones, as in Megatron-LM and DeepSpeed). `launch_s`: time from kernel to kernel.
    `split_s`: what each operator that reads a weight adds on a processor where the gradient of the
    weight is made in a pass of its own; a GPU waits where its kernels there take less than that.
    `memory` is what the framework keeps beside tensors of the model.
    """

    name: str
    attention: str = "flash2"
    keeps_scores: bool = True
    merges: str = ""
    fuses_loss: bool = False
    fused_optimizer: bool = False
    clips: bool = True
    overlaps: bool = True
    hides_moves: bool = False
    stacks: bool = True
    gathers_again: bool = False
    fuses_casts: bool = False
    stops_early: bool = True
    launch_s: float = 5e-6
    split_s: float = 0.0
    bucket_elements: tuple[int, int] = (0, 0)
    overlaps_gathers: bool = False
    memory: FrameworkMemory = OWN_MEMORY

    def __post_init__(self) -> None:
        if self.attention not in NAMES:
            raise InputError(f"attention {self.attention!r}{nearest(self.attention, NAMES)}")
        if self.merges not in MERGES:
            raise InputError(f"software merges {self.merges!r}: not one of {list(MERGES)}")


# Megatron-Core, DistributedDataParallelConfig: max(40e6, 1e6 x data-parallel ranks).
MEGATRON_BUCKETS = (40_000_000, 1_000_000)
APEX_BUCKETS = (250_000_000, 0)

GENERATIONS: Mapping[str, Software] = MappingProxyType(
    {
        s.name: s
        for s in (
            # Megatron-LM and what grew out of it, 2019 to 2022: fused elementwise kernels, softmax
            # with scale and mask, Adam of apex; gradients are reduced after the last backward pass.
            Software(
                "megatron", attention=SCORES, merges=ELEMENTWISE, fused_optimizer=True,
                overlaps=False, stacks=False, gathers_again=True, stops_early=False,
                bucket_elements=MEGATRON_BUCKETS,
            ),
            # PyTorch before FlashAttention, 2018 to 2021, with an optimizer of apex: every operator
            # is a kernel, scores of attention included.
            Software("eager 2020", attention=SCORES, fused_optimizer=True),
            # The same with apex's DistributedDataParallel and its buckets as in NVIDIA's BERT
            # (DeepLearningExamples, run_pretraining.py: message_size): a model that fits one is
            # reduced after the backward pass.
            Software(
                "apex 2020", attention=SCORES, fused_optimizer=True, bucket_elements=APEX_BUCKETS
            ),
            # PyTorch as it is, with FlashAttention; nothing else is fused.
            Software("eager"),
            # The same with the first FlashAttention, or its translation to Triton, and its
            # cross-entropy (llm-foundry until 2023: loss_fn fused_crossentropy).
            Software("eager 2023", attention="flash1", fuses_loss=True),
            # Kernels fused by hand as in Megatron-LM, with FlashAttention and overlap (since 2023).
            Software(
                "fused", merges=ELEMENTWISE, fused_optimizer=True, stacks=False, stops_early=False
            ),
            # The same with the first FlashAttention.
            Software(
                "fused 2023", attention="flash1", merges=ELEMENTWISE, fused_optimizer=True,
                stacks=False, stops_early=False,
            ),
            # Megatron-Core with TransformerEngine (since 2024): attention of cuDNN, norms and
            # losses in one kernel, collectives of tensor parallelism beside products.
            Software(
                "engine", attention="cudnn", merges=ROWS, fuses_loss=True, fused_optimizer=True,
                hides_moves=True, stacks=False, gathers_again=True, fuses_casts=True,
                stops_early=False, bucket_elements=MEGATRON_BUCKETS,
                overlaps_gathers=True,
            ),
            # Compiled by TorchInductor.
            Software("compiled", merges=ROWS, fused_optimizer=True, launch_s=2.5e-6),
        )
    }
)  # fmt: skip

# A call of autograd for each reader (0.20 to 0.23 ms of the host of an H100, torch 2.11, by
# measure.split_s); a processor that was not calibrated is taken to need as much.
SPLIT_S = 2e-4
# What parloom's own generated programs run on; clipping is the training script's.
OWN = replace(GENERATIONS["eager"], name="parloom", clips=False, split_s=SPLIT_S)
