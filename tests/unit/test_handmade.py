"""Plans by hand against closed forms: parameters per rank, FLOPs, volumes of collectives."""

from dataclasses import replace

import pytest

from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import Program, plan, program
from parloom.cost.clusters import load_cluster
from parloom.cost.collectives import BACKENDS, collective
from parloom.cost.framework_memory import MEGATRON
from parloom.cost.kernels import Kernels, LocalOperator, Seconds
from parloom.cost.software import GENERATIONS, Software
from parloom.cost.step import priced
from parloom.cost.tasks import ACTIVATIONS, OPTIMIZER
from parloom.cost.works import Called, Work
from parloom.errors import InputError
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, part_of
from parloom.ir.plan import Optimizer
from parloom.ir.repeat import repeated
from tests.unit.graphs import stack

BATCH, SEQ, WIDTH, VOCAB, DEPTH = 16, 8, 32, 64, 4
BLOCK = 8 * WIDTH * WIDTH + WIDTH
EMBEDDINGS = 2 * VOCAB * WIDTH
CLUSTER = load_cluster("2x8xA100")
PLAIN = Configuration(master_dtype=None)


def model(depth: int = DEPTH) -> Graph:
    return repeated(stack(2, BATCH, SEQ, WIDTH, VOCAB), depth)


def built(chosen: Configuration, graph: Graph | None = None) -> Program:
    return program(graph or model(), chosen, machine(chosen))


def machine(chosen: Configuration) -> Cluster:
    return part_of(CLUSTER, chosen.ranks)


def stored_weights(found: Program, index: int) -> int:
    """Elements of the weights of a stage on one device."""
    part, pcg = found.parts[index], found.lowered[index]
    own = priced(pcg, load_cluster("1xA100"), part.decisions)
    return own.parameters.stored_bytes()["weights"] // 4


def stored(found: Program, index: int = 0) -> dict[str, int]:
    """Elements of weights, gradients and optimizer states of a rank of a stage."""
    own = part_of(machine(found.chosen), found.chosen.ranks // found.chosen.pipeline)
    part, pcg = found.parts[index], found.lowered[index]
    sizes = priced(pcg, own, part.decisions, Optimizer("adamw", 2)).parameters.stored_bytes()
    return {name: size // 4 for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("tensor", "data", "zero"), [(1, 4, 1), (1, 4, 2), (1, 4, 3), (2, 2, 1), (4, 4, 3)]
)
def test_parameters_of_a_rank(tensor: int, data: int, zero: int) -> None:
    chosen = replace(PLAIN, tensor=tensor, data=data, zero=zero, num_microbatches=BATCH // data)
    norms = DEPTH * WIDTH  # on every rank
    whole = (EMBEDDINGS + DEPTH * (BLOCK - WIDTH)) // tensor + norms
    share = {
        name: data if zero >= level else 1 for name, level in (("weights", 3), ("gradients", 2))
    }
    found = stored(built(chosen))
    assert found["weights"] == whole // share["weights"]
    assert found["gradients"] == whole // share["gradients"]
    assert found["optimizer"] == 2 * whole // data


def test_stages_share_the_blocks() -> None:
    chosen = replace(PLAIN, pipeline=4, num_microbatches=BATCH)
    found = built(chosen)
    sizes = [stored(found, index)["weights"] for index in range(4)]
    assert sizes == [VOCAB * WIDTH + BLOCK, BLOCK, BLOCK, VOCAB * WIDTH + BLOCK]


@pytest.mark.parametrize(
    ("depth", "stages", "blocks"),
    [
        (5, 3, [2, 2, 1]),  # the first take what is left over
        (6, 4, [1, 2, 2, 1]),  # embedding and loss stand for a block each
        (2, 4, [0, 1, 1, 0]),
        (3, 2, [2, 1]),
    ],
)
def test_blocks_that_do_not_divide(depth: int, stages: int, blocks: list[int]) -> None:
    chosen = replace(PLAIN, pipeline=stages, num_microbatches=BATCH)
    found = program(model(depth), chosen, load_cluster(f"{stages}xA100"))
    sizes = [stored_weights(found, index) for index in range(stages)]
    ends = [VOCAB * WIDTH, *[0] * (stages - 2), VOCAB * WIDTH]
    assert [(s - e) // BLOCK for s, e in zip(sizes, ends, strict=True)] == blocks
    played = found.play(load_cluster(f"{stages}xA100"))
    assert len(played.messages) == 2 * (stages - 1) * BATCH
    assert all(m.end_ps > m.start_ps for m in played.messages)


def test_zero_over_a_part_of_the_data_parallel_ranks() -> None:
    chosen = replace(PLAIN, data=8, zero=1, shard=2, num_microbatches=2)
    whole = EMBEDDINGS + DEPTH * BLOCK
    assert stored(built(chosen))["optimizer"] == whole
    with pytest.raises(InputError, match="ZeRO over 3 of 8"):
        built(replace(chosen, shard=3))


def test_context_parallel_ranks_share_what_zero_shards() -> None:
    whole = EMBEDDINGS + DEPTH * BLOCK
    alone = replace(PLAIN, context=4, zero=3, num_microbatches=BATCH)
    assert stored(built(alone))["weights"] == whole // 4
    both = replace(PLAIN, context=2, data=4, zero=1, num_microbatches=BATCH // 4)
    assert stored(built(both))["optimizer"] == 2 * whole // 8
    assert stored(built(replace(both, shard=2)))["optimizer"] == 2 * whole // 4


def flops(found: Program, *, stops_early: bool = False) -> float:
    """Forward and backward FLOPs of a step on all ranks, counted by a table that measures FLOPs."""

    class Counting:
        def seconds(self, operator: LocalOperator) -> Seconds:
            work = operator.flops if operator.op == "linear" else 0.0
            return Seconds(work, work * len(operator.wanted))

    chosen = found.chosen
    own = part_of(machine(chosen), chosen.ranks // chosen.pipeline)
    total = 0.0
    for part, pcg in zip(found.parts, found.lowered, strict=True):
        software = Software("none", launch_s=0.0, stops_early=stops_early)
        kernels = Kernels(own.device, software, Counting())
        walked = priced(pcg, own, part.decisions, kernels=kernels)
        for backward, track in ((False, walked.main.forward), (True, walked.main.backward)):
            for work in track.works:
                if isinstance(work, Called):
                    inner = walked.walker.inner(work, backward)
                    total += sum(
                        w.compute_s
                        for t in inner
                        for w in t.works
                        if isinstance(w, Work) and w.kind == "linear"
                    )
                elif work.kind == "linear":
                    total += work.compute_s
    return total * chosen.num_microbatches * own.num_devices


@pytest.mark.parametrize(
    "chosen",
    [
        Configuration(num_microbatches=16),
        Configuration(data=4, num_microbatches=4, zero=3),
        Configuration(tensor=4, data=2, num_microbatches=8),
        Configuration(tensor=2, data=2, pipeline=2, num_microbatches=8),
        Configuration(tensor=4, data=2, num_microbatches=8, sequence_parallel=True),
        Configuration(pipeline=2, interleave=2, num_microbatches=16),
    ],
)
def test_flops_of_a_step(chosen: Configuration) -> None:
    """6 FLOPs per parameter of a product and token; 8 with full recomputation (of the blocks).

    The last product of a block is not run again by a checkpoint that stops early.
    """
    products = DEPTH * (BLOCK - WIDTH)
    head = VOCAB * WIDTH
    tokens = BATCH * SEQ
    assert flops(built(chosen)) == pytest.approx(6 * (products + head) * tokens)
    again = flops(built(replace(chosen, recompute="full")))
    assert again == pytest.approx((8 * products + 6 * head) * tokens)
    early = flops(built(replace(chosen, recompute="full")), stops_early=True)
    assert early == pytest.approx(again - 2 * DEPTH * 4 * WIDTH * WIDTH * tokens)
    every_other = flops(built(replace(chosen, recompute="alternate")))
    assert flops(built(chosen)) < every_other <= again


@pytest.mark.parametrize(("pipeline", "interleave"), [(1, 1), (4, 1), (2, 2), (4, 2), (2, 1)])
def test_every_other_block_is_recomputed_however_many_a_chunk_has(
    pipeline: int, interleave: int
) -> None:
    """Of the model, and of each rank that has several; a chunk of one block alone is not all."""
    depth = 8
    chosen = Configuration(
        pipeline=pipeline, interleave=interleave, num_microbatches=BATCH, recompute="alternate"
    )
    parts = plan(model(depth), chosen, machine(chosen))
    each = [0] * pipeline
    for index, part in enumerate(parts):
        each[index % pipeline] += len(part.decisions.activations)
    assert each == [depth // pipeline // 2] * pipeline
    four = plan(model(4), replace(chosen, pipeline=4, interleave=1), part_of(CLUSTER, 4))
    assert [len(part.decisions.activations) for part in four] == [1, 0, 1, 0]


def moved(found: Program, kind: str, least: float) -> float:
    """Bytes that a rank sends in collectives of a kind, of at least `least` bytes each, in a
    microbatch's two passes.
    """
    chosen = found.chosen
    own = part_of(machine(chosen), chosen.ranks // chosen.pipeline)
    walked = priced(found.lowered[0], own, found.parts[0].decisions)
    sizes: list[float] = []
    for backward, track in ((False, walked.main.forward), (True, walked.main.backward)):
        works: list[Work | Called] = []
        for work in track.works:
            inner = walked.walker.inner(work, backward) if isinstance(work, Called) else ()
            works += [w for t in inner for w in t.works] or [work]
        exchanges = [w.exchange for w in works if isinstance(w, Work)]
        sizes += [t[1] for e in exchanges if e and e.kind == kind for t in e.traffic]
    return sum(size for size in sizes if size >= least)


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallelism_reduces_once_a_pass_and_block(tensor: int) -> None:
    """One all-reduce of the activations forward and one backward (Shoeybi et al., 2019, figure 3);
    one more for the embedding's result and for the gradient of what the head reads.
    """
    chosen = replace(PLAIN, tensor=tensor, num_microbatches=BATCH)
    ring = 2 * (tensor - 1) / tensor * SEQ * WIDTH * 4
    assert moved(built(chosen), "all_reduce", ring) == pytest.approx((2 * DEPTH + 2) * ring)
    assert moved(built(chosen), "all_gather", 0) == 0


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_sequence_parallelism_moves_as_much_in_other_collectives(tensor: int) -> None:
    """An all-reduce is a reduce-scatter and an all-gather (Korthikanti et al., 2022, 4.2)."""
    chosen = replace(PLAIN, tensor=tensor, num_microbatches=BATCH, sequence_parallel=True)
    found = built(chosen)
    half = (tensor - 1) / tensor * SEQ * WIDTH * 4
    assert moved(found, "all_gather", half) == pytest.approx((2 * DEPTH + 2) * half)
    assert moved(found, "reduce_scatter", half) == pytest.approx((2 * DEPTH + 2) * half)
    assert moved(found, "all_reduce", half) == 0


def test_a_pipeline_of_equal_stages_takes_what_the_formula_says() -> None:
    """(m + p - 1) passes of a stage; the ends do a little more (Narayanan et al., SC'21)."""
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 8)
    chosen = replace(PLAIN, pipeline=4, num_microbatches=BATCH)
    cluster = machine(chosen)
    links = (replace(x.link, bandwidth_bytes_per_s=1e18, latency_s=0.0) for x in cluster.levels)
    levels = zip(cluster.levels, links, strict=True)
    fast = replace(cluster, levels=tuple(replace(x, link=link) for x, link in levels))
    kernels = Kernels(cluster.device, GENERATIONS["compiled"])
    found = program(graph, chosen, cluster)
    own = part_of(cluster, 1)
    middle = priced(found.lowered[1], own, found.parts[1].decisions, None, kernels)
    each = middle.main.forward.total.price.compute_s + middle.main.backward.total.price.compute_s
    each += middle.parameters.collect().price.compute_s
    update = middle.parameters.update().price.compute_s
    played = found.play(fast, kernels)
    assert played.step_s == pytest.approx((BATCH + 3) * each + update, rel=0.05)
    slower = replace(chosen, num_microbatches=BATCH // 2, microbatch=2)
    assert program(graph, slower, cluster).play(fast, kernels).peak_bytes > 0


def test_interleaving_shrinks_the_bubble() -> None:
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 8)
    plain = replace(PLAIN, pipeline=4, num_microbatches=4, microbatch=4)
    cluster = machine(plain)
    one = program(graph, plain, cluster).play(cluster)
    two = program(graph, replace(plain, interleave=2), cluster).play(cluster)
    assert two.step_s < one.step_s


def test_the_schedule_of_a_plan_is_played() -> None:
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 8)
    plain = replace(PLAIN, pipeline=4, num_microbatches=16)
    cluster = machine(plain)
    names = ("1f1b", "zb_1p", "zb_2p")
    # Passes of weights that their kernels take longer than the processor.
    kernels = Kernels(cluster.device, GENERATIONS["megatron"])
    found = {
        name: program(graph, replace(plain, schedule=name, synchronizes=False), cluster).play(
            cluster, kernels
        )
        for name in names
    }
    one, two = found["zb_1p"], found["zb_2p"]
    assert two.period_s < one.period_s < found["1f1b"].period_s
    # Gradients that wait for W take memory, too: not enough is left for no bubble at all.
    assert two.period_s <= two.step_s
    # Twice as many microbatches may be held, and halves of backward passes are played.
    held = [each.processes[0].memory.peaks[ACTIVATIONS] for each in (one, two)]
    assert held[1] > 1.5 * held[0]
    assert {"F0", "B0", "W0"} <= {span.name for span in two.processes[0].spans}
    together = program(graph, replace(plain, schedule="zb_2p"), cluster).play(cluster, kernels)
    assert together.period_s == together.step_s >= two.period_s
    default = program(graph, plain, cluster).play(cluster)
    named = program(graph, replace(plain, schedule="1f1b"), cluster).play(cluster)
    assert default.step_s == named.step_s
    with pytest.raises(InputError, match="no schedule 'zb_3p'"):
        program(graph, replace(plain, schedule="zb_3p"), cluster).play(cluster)


def test_equal_stages_are_lowered_once() -> None:
    found = built(replace(PLAIN, pipeline=8, num_microbatches=BATCH), model(8))
    assert len({id(pcg) for pcg in found.lowered}) == 3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="32 ranks"):
        plan(model(), Configuration(data=32, num_microbatches=1), CLUSTER)
    with pytest.raises(InputError, match="4 blocks do not make 8 stages"):
        built(replace(PLAIN, pipeline=8, num_microbatches=16))
    with pytest.raises(InputError, match="not 8 samples"):
        built(replace(PLAIN, num_microbatches=8))
    with pytest.raises(InputError, match="no regular part"):
        part_of(CLUSTER, 3 * 7)


def test_a_fused_optimizer_needs_no_memory_of_its_own() -> None:
    found = built(replace(PLAIN, data=4, num_microbatches=4))
    cluster, weights = machine(found.chosen), EMBEDDINGS + DEPTH * BLOCK
    peaks = [
        found.play(cluster, Kernels(cluster.device, software)).processes[0].memory.peaks[OPTIMIZER]
        for software in (Software("one by one"), Software("at once", fused_optimizer=True))
    ]
    assert peaks[0] - peaks[1] == 4 * weights  # denominators


def test_software_that_does_not_overlap_reduces_after_the_backward_pass() -> None:
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 4)
    chosen = replace(PLAIN, data=16, num_microbatches=1)
    found = program(graph, chosen, CLUSTER)
    overlaps = Software("overlaps")
    waits = replace(overlaps, overlaps=False)
    early, late = (
        found.play(CLUSTER, Kernels(CLUSTER.device, software)) for software in (overlaps, waits)
    )
    kernels = Kernels(CLUSTER.device, waits)
    alone = priced(found.lowered[0], CLUSTER, found.parts[0].decisions, kernels=kernels)
    reduced = sum(transfer.total().comm_s for transfer in alone.buckets)
    compute = alone.main.forward.total.seconds + alone.main.backward.total.seconds
    compute += alone.parameters.update().price.compute_s
    assert late.step_s == pytest.approx(compute + reduced, rel=0.02)
    assert early.step_s < late.step_s


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_stages_send_gradients_of_inputs_before_they_reduce_those_of_weights(
    zero: int, overlaps: bool
) -> None:
    chosen = replace(PLAIN, pipeline=4, data=4, zero=zero, num_microbatches=4)
    found = built(chosen, repeated(stack(2, BATCH, SEQ, 1024, 8), 4))
    software = replace(GENERATIONS["megatron"], overlaps=overlaps, memory=MEGATRON)
    cluster = machine(chosen)
    kernels = Kernels(cluster.device, software)
    alone = priced(found.lowered[0], part_of(cluster, 4), found.parts[0].decisions, kernels=kernels)
    reduced_ps = 1e12 * sum(transfer.total().comm_s for transfer in alone.buckets)
    for process in found.play(cluster, kernels).processes:
        backward = [span.played.ps for span in process.spans if span.name.startswith("B")]
        assert len(backward) == 4
        assert reduced_ps > 0.2 * backward[0]
        slowed = backward[-1] - backward[0]
        assert 0 <= slowed <= (BACKENDS["nccl"].slows * backward[0] if overlaps else 0)
        (wait,) = [span.played.ps for span in process.spans if span.name == "REDUCE"]
        assert overlaps or wait == pytest.approx(reduced_ps, rel=0.2)


@pytest.mark.parametrize(("pipeline", "interleave"), [(2, 1), (4, 1), (2, 2), (1, 1)])
def test_stages_add_up_the_gradient_of_a_tied_head(pipeline: int, interleave: int) -> None:
    chosen = replace(PLAIN, pipeline=pipeline, interleave=interleave, num_microbatches=BATCH)
    vocab, cluster = 1 << 20, machine(chosen)
    ends = []
    for tied in (False, True):
        graph = repeated(stack(2, BATCH, SEQ, WIDTH, vocab, tied), 4)
        found = built(chosen, graph).play(cluster)
        ends.append(found)
    # Between two ranks each sends half of it twice.
    sent = collective("send", 4 * vocab * WIDTH, ((0, 2),), CLUSTER).seconds
    exposed = [found.exposed(0).get("gradients of shared weights", 0) / 1e12 for found in ends]
    assert exposed == [0, pytest.approx(sent if pipeline > 1 else 0, rel=0.01)]
    if pipeline > 2:
        assert ends[1].exposed(1).get("gradients of shared weights", 0) == 0


def test_collectives_that_are_hidden_behind_products() -> None:
    chosen = replace(PLAIN, tensor=8, num_microbatches=BATCH, sequence_parallel=True)
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 4)
    cluster = machine(chosen)
    found = program(graph, chosen, cluster)
    plain = GENERATIONS["compiled"]
    one, other = (
        found.play(cluster, Kernels(cluster.device, software)).step_s
        for software in (plain, replace(plain, hides_moves=True))
    )
    assert other < one


@pytest.mark.parametrize("slower", [1, 1000])
def test_no_more_is_hidden_than_the_product_takes(slower: int) -> None:
    """Links a thousand times as slow: products hide next to nothing of what they wait for."""
    chosen = replace(PLAIN, tensor=8, num_microbatches=BATCH, sequence_parallel=True)
    cluster = machine(chosen)
    link = replace(cluster.levels[0].link, bandwidth_bytes_per_s=450e9 / slower)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], link=link), *cluster.levels[1:]))
    found = program(repeated(stack(2, BATCH, SEQ, 1024, 8), 4), chosen, cluster)
    hides, waits = (replace(GENERATIONS["compiled"], hides_moves=h) for h in (True, False))
    steps = [found.play(cluster, Kernels(cluster.device, s)).step_s for s in (hides, waits)]
    computed = priced(found.lowered[0], cluster, found.parts[0].decisions)
    products_s = BATCH * (
        computed.main.forward.total.price.compute_s + computed.main.backward.total.price.compute_s
    )
    assert 0 < steps[1] - steps[0] < products_s


def test_what_is_gathered_again_is_priced() -> None:
    chosen = replace(PLAIN, tensor=8, num_microbatches=BATCH, sequence_parallel=True)
    cluster = machine(chosen)
    found = program(repeated(stack(2, BATCH, SEQ, 1024, 8), 4), chosen, cluster)
    traffic = {}
    for again in (False, True):
        software = replace(GENERATIONS["megatron"], gathers_again=again)
        own = priced(
            found.lowered[0], cluster, found.parts[0].decisions,
            kernels=Kernels(cluster.device, software),
        )  # fmt: skip
        total = own.main.backward.total
        traffic[again] = sum(size for _, size, _ in total.price.comm), total.seconds
    (less, sooner), (more, later) = traffic[False], traffic[True]
    # One gather of what the first product of each block and the head read: 7/8 of a microbatch's
    # activations.
    gathered = 4 * SEQ * 1024 * 7 / 8
    assert more - less == pytest.approx((4 + 1) * gathered)
    assert later > sooner


def test_gradients_of_microbatches_are_added() -> None:
    graph = repeated(stack(2, BATCH, SEQ, 1024, 8), 4)
    cluster = part_of(CLUSTER, 1)
    chosen = replace(PLAIN, num_microbatches=2, microbatch=8)
    found = program(graph, chosen, cluster)
    parameters = priced(found.lowered[0], cluster, found.parts[0].decisions).parameters
    elements = sum(p.elements(found.lowered[0].mesh) for p in found.lowered[0].parameters)
    kernels = Kernels(cluster.device)
    assert parameters.collect().price.compute_s == pytest.approx(kernels.stream_s(12 * elements))
    # Chunks are added where gradients are stored in chunks.
    sharded = replace(PLAIN, data=4, zero=3, num_microbatches=2, microbatch=2)
    other = program(graph, sharded, part_of(CLUSTER, 4))
    less = priced(other.lowered[0], part_of(CLUSTER, 4), other.parts[0].decisions).parameters
    assert less.collect().price.compute_s < parameters.collect().price.compute_s / 3
