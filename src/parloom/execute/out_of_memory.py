"""A GPU that ran out of memory in a step: which rank, how much beside what was predicted, and what
to try.
"""

import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parloom.cost.clusters import load_cluster
from parloom.cost.units import bytes_up, format_bytes
from parloom.errors import LaunchError
from parloom.ir.lower_stages import stage_ranks
from parloom.ir.plan import MEMORY, Plan

ASKED = re.compile(r"Tried to allocate ([0-9.]+) (GiB|MiB|KiB|bytes)")
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
FRAGMENTED = 0.05  # of the device: below, other segments would not have helped
SAFETY = 0.98  # of the limit that is proposed
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Seen:
    """What the allocator of a device says: its peak of tensors, tensors and segments now, in bytes,
    and what could not be had.
    """

    device_bytes: int
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    asked_bytes: int

    @property
    def needed_bytes(self) -> int:
        """At least so much would have been held at once."""
        return max(self.peak_bytes, self.allocated_bytes + self.asked_bytes)

    @property
    def fragmented_bytes(self) -> int:
        """Memory that the allocator has and no tensor uses."""
        return self.reserved_bytes - self.allocated_bytes


def seen_on(device: torch.device, error: torch.OutOfMemoryError) -> Seen:
    """What the device's allocator says when `error` was raised."""
    found = ASKED.search(str(error))
    asked = round(float(found[1]) * UNITS[found[2]]) if found else 0
    return Seen(
        torch.cuda.get_device_properties(device).total_memory,
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        asked,
    )


def snapshot(rank: int) -> Path | None:
    """The allocator's segments as a file for pytorch.org/memory_viz; None where it writes none."""
    path = Path(tempfile.gettempdir()) / f"parloom-memory-rank{rank}.pickle"
    with suppress(Exception):  # the error that is told matters more
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path
    return None


def out_of_memory(plan: Plan, rank: int, step: int, seen: Seen, file: Path | None) -> LaunchError:
    """The error that ends the run."""
    lines = [
        f"rank {rank}{_stages(plan, rank)} ran out of GPU memory in step {step}:"
        f" {bytes_up(seen.needed_bytes)} were needed of {format_bytes(seen.device_bytes)}"
        f" ({format_bytes(seen.allocated_bytes)} in tensors and {format_bytes(seen.asked_bytes)}"
        " asked for)",
        _predicted(plan, seen),
        f"{format_bytes(seen.fragmented_bytes)}"
        f" ({seen.fragmented_bytes / seen.device_bytes:.0%}) are reserved and not in use"
        " (fragmentation)",
    ]
    if file is not None:
        lines.append(f"what lies where: {file}, open it in https://pytorch.org/memory_viz")
    if seen.fragmented_bytes > FRAGMENTED * seen.device_bytes:
        lines.append(f"try: {SETTING}, so that segments grow in place of new ones")
    lines.append(f"try: {replanned(plan, seen)}")
    return LaunchError("\n".join(lines))


def replanned(plan: Plan, seen: Seen) -> str:
    """The command that plans for as much less as the step needed more than was predicted, and for
    less than this plan takes.
    """
    others = tuple(c for c in plan.constraints if not c.text.startswith(MEMORY))
    there = min(seen.device_bytes, load_cluster(plan.cluster).device.memory_bytes)
    more = max(1.0, seen.needed_bytes / _peak(plan)) if _peak(plan) else 1.0
    limit = int(SAFETY * min(there / more, _peak(plan) or there)) // MIB
    if plan.source.is_live:
        return f"parloom.plan(..., memory='{limit}MiB')"
    return f"{replace(plan, constraints=others).command()} {MEMORY}{limit}MiB"


def _predicted(plan: Plan, seen: Seen) -> str:
    peak = _peak(plan)
    if not peak:
        return "the plan has no predicted peak"
    return (
        f"predicted peak of the fullest device: {format_bytes(peak)}"
        f" ({seen.needed_bytes / peak - 1:+.0%} in the run)"
    )


def _peak(plan: Plan) -> int:
    return plan.prediction.peak_bytes if plan.prediction else 0


def _stages(plan: Plan, rank: int) -> str:
    """The stages of a rank, where there are several."""
    ranks = stage_ranks(plan.decisions)
    if len(ranks) == 1:
        return ""
    own = [str(stage) for stage, members in enumerate(ranks) if rank in members]
    return f" (stage{'s' if len(own) > 1 else ''} {', '.join(own)})"
