"""Bytes of a device as three tools report them: allocated, reserved, and seen by the driver.

Published numbers are one of these: `torch.cuda.max_memory_allocated` (tensors alone),
`max_memory_reserved` (with what the caching allocator keeps), or nvidia-smi's (with the driver's
context and NCCL's buffers, too).
"""

from dataclasses import dataclass

from parloom.cost.allocator import max_reserved_bytes
from parloom.cost.framework_memory import COMMUNICATOR_BYTES, WORKSPACE_BYTES, FrameworkMemory
from parloom.cost.timeline import Process, Timeline
from parloom.ir.mesh import Device

# A GPU of "80 GB" has so many GiB, less what ECC and firmware take: nvidia-smi shows 16,160 MiB of
# V100-16GB, 32,510 of V100-32GB, 40,536 of A100-40GB, 81,251 of A100-80GB, 81,559 of H100-80GB and
# 143,771 of H200-141GB (data sheet: what drivers report); this is the least of their shares.
VISIBLE_SHARE = 0.986


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most bytes of a device in a step; `device_bytes` is what a run needs of it, of
    `capacity_bytes` that the driver has.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the device has as much; if it ran, something that was assumed is refuted."""
        return self.device_bytes <= self.capacity_bytes


def visible_bytes(device: Device) -> int:
    """What a driver has of a GPU's memory, which vendors state in units of 2**30 bytes."""
    return round(device.memory_bytes / 1e9 * (1 << 30) * VISIBLE_SHARE)


def footprint(
    timeline: Timeline, device: Device, memory: FrameworkMemory, communicators: int
) -> Footprint:
    """Of the device that allocates the most, which has `communicators` groups with buffers."""
    most: Process = max(timeline.processes, key=lambda process: process.memory.peak)
    allocated = most.memory.peak
    beside = memory.context_bytes + communicators * COMMUNICATOR_BYTES
    visible = visible_bytes(device)
    reserved = allocated
    if not memory.plans_ahead:
        allocated += WORKSPACE_BYTES
        capacity = visible - beside - WORKSPACE_BYTES
        reserved = max_reserved_bytes(most, capacity) + WORKSPACE_BYTES
    return Footprint(allocated, reserved, reserved + beside, visible)
