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


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most bytes of a device in a step; `device_bytes` is what a run needs of it."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


def footprint(
    timeline: Timeline, device: Device, memory: FrameworkMemory, communicators: int
) -> Footprint:
    """Of the device that allocates the most, which has `communicators` groups with buffers."""
    most: Process = max(timeline.processes, key=lambda process: process.memory.peak)
    allocated = most.memory.peak
    beside = memory.context_bytes + communicators * COMMUNICATOR_BYTES
    reserved = allocated
    if not memory.plans_ahead:
        allocated += WORKSPACE_BYTES
        capacity = device.memory_bytes - beside - WORKSPACE_BYTES
        reserved = max_reserved_bytes(most, capacity) + WORKSPACE_BYTES
    return Footprint(allocated, reserved, reserved + beside)
