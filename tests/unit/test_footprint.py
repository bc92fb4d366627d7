"""What frameworks keep beside tensors of a model, against the bytes that they document."""

from dataclasses import replace

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, communicators, program
from parloom.cost.clusters import load_cluster
from parloom.cost.footprint import footprint
from parloom.cost.framework_memory import (
    COMMUNICATOR_BYTES,
    COMPILED,
    DDP,
    DEEPSPEED,
    FSDP,
    MEGATRON,
    OWN,
    WORKSPACE_BYTES,
    FrameworkMemory,
)
from parloom.cost.kernels import Kernels
from parloom.cost.software import Software
from parloom.cost.timeline import Timeline
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import Optimizer
from parloom.ir.text import parse_graph, print_graph
from tests.unit.graphs import stack

BATCH, SEQ, WIDTH, VOCAB, DEPTH = 16, 8, 32, 64, 4
PARAMETERS = 2 * VOCAB * WIDTH + DEPTH * (8 * WIDTH * WIDTH + WIDTH)
IDS_BYTES = 2 * BATCH * SEQ * 8  # the batch
CLUSTER = load_cluster("1x8xA100")


def built(data: int, zero: int, microbatches: int = 2) -> Program:
    text = print_graph(stack(DEPTH, BATCH, SEQ, WIDTH, VOCAB)).replace("float32", "bfloat16")
    chosen = Configuration(
        data=data, zero=zero, microbatch=BATCH // data // microbatches,
        num_microbatches=microbatches,
    )  # fmt: skip
    return program(parse_graph(text), chosen, machine(data))


def machine(data: int) -> Cluster:
    return part_of(CLUSTER, data)


def played(memory: FrameworkMemory, data: int = 1, zero: int = 0) -> Timeline:
    software = Software("any", fused_optimizer=True, stacks=False, memory=memory)
    kernels = Kernels(CLUSTER.device, software)
    return built(data, zero).play(machine(data), kernels, Optimizer("adamw", 2))


def at(timeline: Timeline, action: str) -> tuple[int, int]:
    """Bytes of all components before an action, and at most in it."""
    (process,) = timeline.processes
    held = sum(process.base)
    for span in process.spans:
        if span.name == action:
            return held, held + span.played.memory.peak
        held += sum(span.played.memory.net)
    raise AssertionError(action)


@pytest.mark.parametrize(
    ("data", "zero", "per_parameter"),
    [(1, 0, 20.0), (4, 0, 20.0), (2, 1, 4 + 16 / 2), (4, 1, 4 + 16 / 4)],
)
def test_megatrons_bytes_per_parameter(data: int, zero: int, per_parameter: float) -> None:
    """Megatron-LM's dist_optimizer.md: 16-bit parameters and gradients."""
    timeline = played(MEGATRON, data, zero)
    _, most = at(timeline, "STEP")
    batch = timeline.processes[0].base[-1]
    assert most - batch == pytest.approx(per_parameter * PARAMETERS, rel=0.01)


def test_bytes_of_another_framework_are_others() -> None:
    """The check above would see copies that are missing, and states that are not sharded."""
    for memory, data, zero in ((DDP, 1, 0), (OWN, 4, 1), (DEEPSPEED, 4, 1)):
        timeline = played(memory, data, zero)
        most = at(timeline, "STEP")[1] - timeline.processes[0].base[-1]
        assert most != pytest.approx((20 if data == 1 else 8) * PARAMETERS, rel=0.01)


@pytest.mark.parametrize(("data", "zero"), [(1, 0), (2, 1), (4, 1)])
def test_deepspeed_lays_gradients_side_by_side_and_turns_them_into_float32(
    data: int, zero: int
) -> None:
    """2 + 2, and of a rank's part: states and master weights of 12, and 2 + 4 for the update."""
    timeline = played(DEEPSPEED, data, zero)
    process = timeline.processes[0]
    _, most = at(timeline, "STEP")
    buckets = 2 * 2 * PARAMETERS if data > 1 else 0  # no bucket is larger than all gradients
    expected = (4 + 18 / data) * PARAMETERS + buckets + process.base[-1]
    assert most == pytest.approx(expected, rel=0.01)


def test_whole_gradients_that_lie_in_a_buffer_are_held_all_along() -> None:
    held, _ = at(played(MEGATRON, 4, 1), "F")
    come, _ = at(played(DDP, 4, 1), "F")
    assert held - come == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert held == pytest.approx((4 + 12 / 4) * PARAMETERS, rel=0.05)


def test_fully_sharded_parameters_have_no_second_copy() -> None:
    """12 bytes over all ranks, against 14 with shards of 16 bits beside those of the optimizer."""
    held, _ = at(played(FSDP, 4, 3), "F")
    both, _ = at(played(DDP, 4, 3), "F")
    assert held == pytest.approx(12 / 4 * PARAMETERS, rel=0.05)
    assert both - held == pytest.approx(2 / 4 * PARAMETERS, rel=0.01)


def test_buffers_that_are_not_kept_come_and_go() -> None:
    kept, other = played(OWN, 4, 3), played(DDP, 4, 3)
    communication = 5
    assert kept.processes[0].base[communication] > 0
    assert other.processes[0].base[communication] == 0
    assert other.processes[0].memory.peaks[communication] > 0
    assert other.peak_bytes <= kept.peak_bytes
    assert sum(other.processes[0].memory.net[:6]) == sum(other.processes[0].base[:6])


def test_a_device_has_the_drivers_context_and_buffers_of_communicators_too() -> None:
    timeline = played(MEGATRON, 4, 1)
    found = footprint(timeline, CLUSTER.device, MEGATRON, 2)
    assert found.allocated_bytes == timeline.peak_bytes + WORKSPACE_BYTES
    assert found.reserved_bytes >= found.allocated_bytes
    beside = MEGATRON.context_bytes + 2 * COMMUNICATOR_BYTES
    assert found.device_bytes == found.reserved_bytes + beside
    assert found.capacity_bytes == pytest.approx(80 * 2**30, rel=0.02)
    assert found.fits
    assert not replace(found, device_bytes=found.capacity_bytes + 1).fits
    planned = footprint(timeline, CLUSTER.device, COMPILED, 0)
    assert planned.reserved_bytes == planned.allocated_bytes == timeline.peak_bytes


def test_groups_that_a_rank_sends_in() -> None:
    assert communicators(Configuration()) == 0
    assert communicators(Configuration(data=4)) == 2
    assert communicators(Configuration(tensor=2, pipeline=2, data=4)) == 4
