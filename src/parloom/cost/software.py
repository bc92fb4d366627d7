"""Generations of training software: what a prediction has to know of the kernels that are run.

A prediction is made for one of the four entries of `GENERATIONS`, chosen by what is known of a run
(framework, year, flags), never by its model or its time. `Software` values with other fields are
welcome where more is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parloom.errors import InputError

ELEMENTWISE, ROWS = "elementwise", "rows"
MERGES = ("", ELEMENTWISE, ROWS)


@dataclass(frozen=True, slots=True)
class Software:
    """How operators become kernels, and which communication goes on beside them.

    `flash`: attention is one kernel that keeps its scores on the chip, and skips what a causal mask
    hides; otherwise scores go through memory, and unless it `keeps_scores` are computed again in
    the backward pass. `merges`: chains of elementwise operators are one kernel each (ELEMENTWISE),
    or with reductions of rows and norms (ROWS), or no operators are (""). `fused_optimizer`: the
    update is one pass over memory. `overlaps`: gradients are reduced beside the backward pass, not
    after it. `hides_moves`: products are cut so that collectives on their operands and results go
    on beside them (asynchronous tensor parallelism). `stacks`: what a collective gathers or
    scatters goes through a stacked copy; otherwise tensors lie so that it need not. `stops_early`:
    a recomputed block runs up to the last operator that saves a tensor (non-reentrant checkpoints
    of PyTorch), otherwise to its end (reentrant ones, as in Megatron-LM and DeepSpeed). `launch_s`:
    time from kernel to kernel.
    """

    name: str
    flash: bool = True
    keeps_scores: bool = True
    merges: str = ""
    fused_optimizer: bool = False
    overlaps: bool = True
    hides_moves: bool = False
    stacks: bool = True
    stops_early: bool = True
    launch_s: float = 5e-6

    def __post_init__(self) -> None:
        if self.merges not in MERGES:
            raise InputError(f"software merges {self.merges!r}: not one of {list(MERGES)}")


GENERATIONS: Mapping[str, Software] = MappingProxyType(
    {
        s.name: s
        for s in (
            # Megatron-LM and what grew out of it, 2019 to 2022: fused elementwise kernels, softmax
            # with scale and mask, Adam of apex; gradients are reduced after the last backward pass.
            Software(
                "megatron", flash=False, merges=ELEMENTWISE, fused_optimizer=True, overlaps=False,
                stacks=False, stops_early=False,
            ),
            # PyTorch as it is, with FlashAttention; nothing else is fused.
            Software("eager"),
            # Kernels fused by hand as in Megatron-LM, with FlashAttention and overlap (since 2023).
            Software(
                "fused", merges=ELEMENTWISE, fused_optimizer=True, stacks=False, stops_early=False
            ),
            # Compiled by TorchInductor.
            Software("compiled", merges=ROWS, fused_optimizer=True, launch_s=2.5e-6),
        )
    }
)  # fmt: skip

# What parloom's own generated programs run on.
OWN = GENERATIONS["eager"]
