"""Memory that a training framework takes beside tensors of the model: copies, buffers, the driver.

Labels: (documented) in the framework's public documentation or source, (data sheet) from the sizes
that a library's source names, (micro-benchmark) measured by others and published. None is fitted.
"""

from dataclasses import dataclass

MIB = 1 << 20

# Buffers of NCCL per connection of a channel: Simple 4 MiB (NCCL_BUFFSIZE), LL 512 KiB, LL128
# 120 x 640 x 8 words of 8 bytes (data sheet: NCCL, src/init.cc and src/include/device.h).
CONNECTION_BYTES = 4 * MIB + MIB // 2 + 120 * 640 * 8 * 8
# Channels that NCCL begins with on NVSwitch (recalled: 12), a ring and a tree on each.
CONNECTIONS = 12 * 2
COMMUNICATOR_BYTES = CONNECTIONS * CONNECTION_BYTES
# A process that has loaded all kernels of PyTorch with CUDA 11: 1,113 MiB on V100 of 16 and 32 GB
# (micro-benchmark: bigscience, experiments/tr3m-1B3.md, "calibration"). CUDA 12 loads kernels when
# they are first used (CUDA_MODULE_LOADING=LAZY, its default on Linux since 12.2): about half of
# that (recalled).
EAGER_CONTEXT_BYTES, LAZY_CONTEXT_BYTES = 1113 * MIB, 550 * MIB
# cuBLAS in PyTorch has a workspace per handle and stream from the caching allocator: of the forward
# and of the backward thread (documented: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8).
WORKSPACE_BYTES = 2 * (8 * MIB + MIB // 8)


@dataclass(frozen=True, slots=True)
class FrameworkMemory:
    """What a framework keeps and makes.

    `pools`: buffers for what travels in chunks stay for the next use; otherwise they come from the
    allocator and go. `in_place`: whole weights and gradients travel where they lie (flat buffers),
    with no copy; gradients stay between steps. `copies`: bytes per updated element that the update
    takes one after the other and holds to its end, to turn narrower gradients into those of the
    master weights; each `at_once` for all parameters, or one by one. `bucket_elements` of gradients
    lie in a buffer from which they are reduced. `norm_bytes`: per element of the gradient at hand
    while its norm is taken. `masters_alone`: weights stored in chunks are
    stored in the dtype of the master weights alone. `plans_ahead`: memory is planned before the
    first step, so that nothing is lost between tensors; otherwise it is that of PyTorch's caching
    allocator. `context_bytes` are the driver's.
    """

    name: str
    pools: bool = False
    in_place: bool = False
    copies: tuple[int, ...] = ()
    at_once: bool = False
    bucket_elements: int = 0
    norm_bytes: int = 0
    masters_alone: bool = False
    plans_ahead: bool = False
    context_bytes: int = LAZY_CONTEXT_BYTES


# parloom's own runtime: `runtime.chunks.Pool`.
OWN = FrameworkMemory("parloom", pools=True)

# PyTorch with DistributedDataParallel or none.
DDP = FrameworkMemory("ddp")
# Fully sharded data parallelism: parameters and gradients are chunks in the dtype of the optimizer,
# gathered in the one that is computed with (documented: torch.distributed.fsdp, MixedPrecision).
FSDP = FrameworkMemory("fsdp", masters_alone=True)
# Megatron-LM with apex: 16-bit gradients lie in one buffer, and become float32 ones for the update
# (documented: docs/source/api-guide/dist_optimizer.md, 20 bytes per parameter, or 4 + 16 / d).
MEGATRON = FrameworkMemory(
    "megatron", in_place=True, copies=(4,), context_bytes=EAGER_CONTEXT_BYTES
)
# Megatron-Core and NeMo, with CUDA 12.
MEGATRON_CORE = FrameworkMemory("megatron-core", in_place=True, copies=(4,))
# DeepSpeed's ZeRO-1 and its optimizers for 16 bits: gradients of a rank's part are laid side by
# side, then turned into float32; norms are taken in float64; of buckets of 5e8 elements, one fills
# and one is reduced (documented: deepspeed/runtime/zero/stage_1_and_2.py and config.py).
DEEPSPEED = FrameworkMemory(
    "deepspeed", in_place=True, copies=(2, 4), at_once=True, bucket_elements=500_000_000,
    norm_bytes=8,
    context_bytes=EAGER_CONTEXT_BYTES,
)  # fmt: skip
# OneFlow, TensorFlow with XLA, Alpa, JAX: a compiler plans all memory of a step.
COMPILED = FrameworkMemory("compiled", plans_ahead=True, copies=(4,))
