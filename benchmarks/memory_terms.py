"""Which memory a published run is about: its framework's own, and the quantity that is printed."""

from collections.abc import Mapping

from parloom.cost.framework_memory import (
    COMPILED,
    DDP,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    MEGATRON_CORE,
    FrameworkMemory,
)

# The first entry whose words are all in the framework's name decides.
FRAMEWORKS: tuple[tuple[tuple[str, ...], FrameworkMemory], ...] = (
    (("composer",), FSDP),
    (("torchtitan",), FSDP),
    (("fsdp",), FSDP),
    (("deepspeed",), DEEPSPEED),
    (("internevo",), DEEPSPEED),
    (("megatron-bridge",), MEGATRON_CORE),
    (("nemo",), MEGATRON_CORE),
    (("megatron",), MEGATRON),
    (("oneflow",), COMPILED),
    (("alpa",), COMPILED),
    (("tensorflow",), COMPILED),
    (("mxnet",), COMPILED),
    (("paddle",), COMPILED),
)
ALLOCATED, RESERVED, DEVICE = "allocated", "reserved", "device"
# torchtitan prints the most that was reserved (torchtitan/components/metrics.py), Alpa the most
# that its workers allocated (get_max_memory_allocated); others say no more than memory of the
# device.
QUANTITIES: tuple[tuple[str, str], ...] = (("torchtitan", RESERVED), ("alpa", ALLOCATED))
# All of these tools count in units of 2**30 bytes, also where they print GB.
UNIT_BYTES = 1 << 30


def memory_of(row: Mapping[str, str]) -> FrameworkMemory:
    """What the row's framework keeps."""
    name = row["framework"].lower()
    return next((m for words, m in FRAMEWORKS if all(word in name for word in words)), DDP)


def quantity_of(row: Mapping[str, str]) -> str:
    """Which of `Footprint`'s the row states."""
    name = row["framework"].lower()
    return next((found for word, found in QUANTITIES if word in name), DEVICE)
