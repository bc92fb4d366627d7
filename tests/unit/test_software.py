"""What software keeps and hides, on a small language model."""

from dataclasses import replace

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, program
from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels
from parloom.cost.software import GENERATIONS, Software
from parloom.cost.step import priced
from parloom.cost.tasks import ACTIVATIONS
from parloom.cost.works import Work
from parloom.ir.repeat import repeated
from tests.unit.graphs import stack

CLUSTER = load_cluster("2x8xH100")
SAMPLES, POSITIONS, WIDTH, VOCAB, DEPTH = 16, 32, 256, 4096, 4
TENSOR = 4
PLAIN = Software("plain")


def built(chosen: Configuration) -> Program:
    graph = repeated(stack(2, SAMPLES, POSITIONS, WIDTH, VOCAB), DEPTH)
    return program(graph, chosen, CLUSTER)


def inside_bytes(found: Program, software: Software, product_dtype: str | None = None) -> int:
    """What a block keeps for its backward pass."""
    kernels = Kernels(CLUSTER.device, software, None, product_dtype)
    walked = priced(found.lowered[0], CLUSTER, found.parts[0].decisions, kernels=kernels)
    return walked.walker.call(found.lowered[0].functions[0].name).inside_bytes


def test_products_keep_their_part_of_what_is_gathered_for_them() -> None:
    """One gather a block: of the input of its perceptron."""
    chosen = Configuration(tensor=TENSOR, data=4, microbatch=SAMPLES // 4, sequence_parallel=True)
    found = built(chosen)
    whole, part = (
        inside_bytes(found, replace(PLAIN, gathers_again=again)) for again in (False, True)
    )
    gathered = SAMPLES // 4 * POSITIONS * WIDTH * 4
    assert whole - part == gathered * (TENSOR - 1) // TENSOR
    alone = built(replace(chosen, tensor=1, data=16, microbatch=1, sequence_parallel=False))
    same = [inside_bytes(alone, replace(PLAIN, gathers_again=again)) for again in (False, True)]
    assert same[0] == same[1]


def test_products_in_eight_bits_keep_a_byte_of_each_activation() -> None:
    found = built(Configuration(data=16))
    fused = replace(PLAIN, fuses_casts=True)
    # The norm's result in one byte for four; relu keeps its own result, which is cast for `down`.
    more = POSITIONS * WIDTH * (1 - 4 + 4)
    assert inside_bytes(found, fused, "float8") - inside_bytes(found, fused) == more
    assert inside_bytes(found, PLAIN, "float8") == inside_bytes(found, PLAIN)


def test_a_fused_loss_keeps_no_copy_of_the_logits() -> None:
    found = built(Configuration(data=16))
    peaks = [
        found.play(CLUSTER, Kernels(CLUSTER.device, software)).processes[0].memory
        for software in (PLAIN, replace(PLAIN, fuses_loss=True))
    ]
    assert peaks[1].peaks[ACTIVATIONS] < peaks[0].peaks[ACTIVATIONS]


def test_updated_weights_are_gathered_beside_the_next_forward_pass() -> None:
    found = built(Configuration(data=16, zero=1))
    waits, beside = (
        found.play(CLUSTER, Kernels(CLUSTER.device, replace(PLAIN, overlaps_gathers=overlaps)))
        for overlaps in (False, True)
    )
    gather = "weights all_gather"
    assert 0 <= beside.exposed().get(gather, 0) < waits.exposed()[gather]
    assert beside.step_s < waits.step_s


def test_larger_buckets_are_fewer() -> None:
    found = built(Configuration(data=16, zero=1))
    small, large = (
        priced(
            found.lowered[0], CLUSTER, found.parts[0].decisions,
            kernels=Kernels(CLUSTER.device, replace(PLAIN, bucket_elements=bucket)),
        ).buckets
        for bucket in ((1, 0), (0, 10**9))
    )  # fmt: skip
    assert len(large) < len(small)
    assert sum(len(b.parameters) for b in large) == sum(len(b.parameters) for b in small)


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_generation_plays_a_step(name: str) -> None:
    found = built(Configuration(tensor=2, data=8, zero=1, sequence_parallel=True, microbatch=2))
    step = found.play(CLUSTER, Kernels(CLUSTER.device, GENERATIONS[name]))
    assert 0 < step.bound_ps <= step.step_ps
    assert step.processes[0].memory.net == step.processes[0].base


def test_recipes_of_eight_bits_leave_out_the_head() -> None:
    found = built(Configuration(data=16))
    kernels = Kernels(CLUSTER.device, PLAIN, None, "float8")
    wide = Kernels(CLUSTER.device, PLAIN)

    def seconds(kernels: Kernels) -> tuple[float, float]:
        """Of main, and of a block."""
        walked = priced(found.lowered[0], CLUSTER, found.parts[0].decisions, kernels=kernels)
        block = walked.walker.call(found.lowered[0].functions[0].name)
        main = (w.compute_s for w in walked.main.forward.works if isinstance(w, Work))
        return sum(main), block.forward.total.price.compute_s

    assert seconds(kernels)[0] == seconds(wide)[0]
    assert seconds(kernels)[1] != seconds(wide)[1]
