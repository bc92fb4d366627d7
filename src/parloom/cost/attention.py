"""Attention in one kernel: the rates of its implementations on the generations of devices.

    seconds = FLOPs / (peak rate x share x keys / (keys + half_keys) x width / (width + half_width))

A causal mask halves the FLOPs, and leaves tiles on the diagonal half empty. What a kernel does for
each score besides multiplying (exponentials) takes as long for narrow heads as for wide ones.
Shares are micro-benchmarks of 16-bit attention with heads of `WIDTH`, unless `fitted` is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parloom.ir.mesh import Device

SCORES = "scores"  # no kernel: products with scores that go through memory
WIDTH = 128
# Kernels work on heads whose width is a multiple of this.
WIDTH_STEP = 32
# Of the keys at which a causal kernel is at half of its rate, the part for kernels without a mask:
# 170 of 450 (FlashAttention-2, figures 4 to 6, A100).
UNMASKED = 0.4


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Shares of the peak rate at which long sequences are computed, forward and backward."""

    forward: float
    backward: float
    half_keys: float
    half_width: float

    def share(self, keys: float, width: int, *, causal: bool, backward: bool) -> float:
        """The share of the peak with so many keys and heads of such a width."""
        padded = -(-width // WIDTH_STEP) * WIDTH_STEP
        rate = self.backward if backward else self.forward
        rate *= (WIDTH + self.half_width) / (padded + self.half_width) * padded / WIDTH
        half = self.half_keys * (1.0 if causal else UNMASKED)
        return rate * width / padded * keys / (keys + half)


# (kernel, generation of devices). "flash1" also stands for its translation to Triton, "efficient"
# for memory-efficient attention of PyTorch where there is no flash kernel.
KERNELS: Mapping[tuple[str, str], AttentionKernel] = MappingProxyType(
    {
        # Recalled: CUTLASS attention of PyTorch on V100, a quarter of the peak.
        ("efficient", "volta"): AttentionKernel(0.25, 0.2, 350, 20),
        # FlashAttention-2 (arXiv:2307.08691), figures 4 and 5: FlashAttention on A100, causal,
        # forward and backward together 58, 80 and 97 TFLOP/s of 312 with 512, 2,048 and 16,384
        # keys and heads of 64, 50 to 80 with heads of 128.
        ("flash1", "ampere"): AttentionKernel(0.33, 0.28, 350, 0),
        # The same, figures 4 to 6: 99, 155 and 189 with heads of 128, 88 to 171 with 64; apart
        # 204 and 168 with 4,096 keys (cudnn-frontend, benchmark/attention_training, A100).
        ("flash2", "ampere"): AttentionKernel(0.68, 0.57, 450, 20),
        # cudnn-frontend, same place, cuDNN 9: 155 and 109 with 2,048 keys, 177 and 140 with 16,384.
        ("cudnn", "ampere"): AttentionKernel(0.58, 0.46, 450, 104),
        # Nothing is published but for A100: fitted to open rows.
        ("flash1", "hopper"): AttentionKernel(0.21, 0.17, 500, 0),
        # FlashAttention-3 (arXiv:2407.08608), figures 5 and 6: H100, FlashAttention-2 forward 191,
        # 298 and 335 of 989 with 512, 2,048 and 16,384 keys; backward 322 without a mask.
        ("flash2", "hopper"): AttentionKernel(0.346, 0.326, 380, 20),
        # The same: FlashAttention-3 forward 292, 521 and 616; backward 561 without a mask.
        ("flash3", "hopper"): AttentionKernel(0.65, 0.575, 600, 54),
        # cudnn-frontend, benchmark/sdpa_benchmark_training, H200, cuDNN 9.19: forward 484, 591, 644
        # and 673 with 2,048 to 16,384 keys, backward 370, 474, 541 and 579.
        ("cudnn", "hopper"): AttentionKernel(0.71, 0.62, 900, 104),
        # The same, B200: FlashAttention-2 254 to 436 of 2,250 forward, 199 to 346 backward.
        ("flash2", "blackwell"): AttentionKernel(0.2, 0.16, 1100, 20),
        # The same, GB200, cuDNN 9.18: forward 1,022, 1,297, 1,563 and 1,646 of 2,500 with 2,048 to
        # 16,384 keys, backward 824, 1,105, 1,279 and 1,371.
        ("cudnn", "blackwell"): AttentionKernel(0.7, 0.6, 1350, 104),
        # FlashAttention-4: 1,605 of 2,250 at best.
        ("flash4", "blackwell"): AttentionKernel(0.71, 0.6, 1350, 104),
    }
)
# The kernel that takes the place of one that a generation of devices does not have.
OLDER: Mapping[str, str] = MappingProxyType(
    {
        "flash4": "flash3",
        "flash3": "flash2",
        "cudnn": "flash2",
        "flash2": "flash1",
        "flash1": "efficient",
    }
)
NAMES = (SCORES, *OLDER, "efficient")


def attention_kernel(name: str, device: Device) -> AttentionKernel:
    """The kernel `name` on `device`, or the next older one that it has.

    A device of a generation without any has its own efficiency, and half of it at 500 keys.
    """
    known: str | None = name
    while known is not None:
        found = KERNELS.get((known, device.generation))
        if found is not None:
            return found
        known = OLDER.get(known)
    share = device.efficiency.attention
    return AttentionKernel(share, 0.8 * share, 500, 0)
