"""A played step against sums by hand: order, overlap, buckets, prefetch, memory, host transfers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.candidates import candidates
from parloom.comparators.baselines import random_plan
from parloom.cost.actions import StageWriter
from parloom.cost.clusters import load_cluster
from parloom.cost.collectives import BACKENDS
from parloom.cost.hardware import DataSheets
from parloom.cost.kernels import Kernels
from parloom.cost.pipeline import StageActions, play_stage, simulate_pipeline
from parloom.cost.simulate import Simulator, simulate, step_tasks
from parloom.cost.software import OWN
from parloom.cost.step import priced
from parloom.cost.tasks import ACTIVATIONS, COMPONENTS, COMPUTE, picoseconds
from parloom.cost.timeline import Slice, Timeline, joined, memory_line, slices
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Host, Link, Mesh, MeshAxis, grid
from parloom.ir.pcg import PCG
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.schedules import schedule
from parloom.ir.text import parse_graph
from parloom.search.meshes import logical_meshes
from parloom.search.request import Request
from tests.unit.step_price import price_plan

BLOCK = """
def block(
    hidden: float32[64, 512],
    up: float32[2048, 512],
    down: float32[512, 2048],
):
    wide: float32[64, 2048] = linear(hidden, up)  # up
    active: float32[64, 2048] = relu(wide)  # act
    out: float32[64, 512] = linear(active, down)  # down
    return out
"""
DEPTH = 6


def model(depth: int = DEPTH) -> Graph:
    """x -> `depth` blocks -> mean of squares."""
    layers = range(depth)
    inputs = "".join(
        f'input {kind}_{i}: float32[{shape}] = parameter("{i}.{kind}", trainable=True)\n'
        for i in layers
        for kind, shape in (("up", "2048, 512"), ("down", "512, 2048"))
    )
    calls = "".join(
        f'    h{i + 1}: float32[64, 512] = block["{i}"](h{i}, up_{i}, down_{i})\n' for i in layers
    )
    return parse_graph(
        'graph "Blocks" training=True\n\ninput h0: float32[64, 512] = batch("x")\n'
        f"{inputs}{BLOCK}\nmain main:\n{calls}    loss: float32[] = sum(h{depth})\n"
        "    return loss\n\nloss loss\n"
    )


def chunked(cluster: Cluster, depth: int = DEPTH, level: int = 3, **other: object) -> Decisions:
    """Data parallel over the whole cluster, with storage of a ZeRO level."""
    mesh = Mesh((MeshAxis("data", tuple(reversed(cluster.prime_axes()))),))
    keys = [
        f"{i}.{key}" for i in range(depth) for key in ("up:linear#0", "act:relu#0", "down:linear#0")
    ]
    nodes = tuple(NodeDecision(key, (("d0", ("data",)),)) for key in [*keys, ":sum#0"])
    axes, whole = Storage(("data",)), Storage()
    storage = [axes if level >= at else whole for at in (3, 2, 1)]
    parameters = tuple(
        ParameterDecision(f"{i}.{kind}", *storage) for i in range(depth) for kind in ("up", "down")
    )
    return replace(Decisions(one_stage(mesh), nodes, parameters), **other)  # type: ignore[arg-type]


def played(timeline: Timeline, track: str) -> list[Slice]:
    """What ran on a track, parts of one transfer joined."""
    parts = [part for span in timeline.processes[0].spans for part in slices(span)]
    return [part for part in joined(parts) if part.track == track]


def run(graph: Graph, cluster: Cluster, decisions: Decisions) -> Timeline:
    return simulate(lower(graph, decisions), cluster, decisions, Optimizer("adamw", 2))


def test_one_device_is_the_sum_of_its_works() -> None:
    cluster, decisions = load_cluster("1xH100"), Decisions(num_microbatches=2)
    graph = model()
    found = run(graph, cluster, decisions)
    price = price_plan(lower(graph, decisions), cluster, decisions, Optimizer("adamw", 2))
    assert found.step_s == pytest.approx(price.step_s, rel=1e-6)
    assert found.bound_ps == found.step_ps
    assert found.busy() == {COMPUTE: found.step_ps}
    assert found.exposed() == {}
    names = [span.name for span in found.processes[0].spans]
    assert names == ["F", "B", "F", "B last", "REDUCE", "STEP", "GATHER"]
    first = played(found, COMPUTE)[0]
    assert (first.name, first.kind, first.start_ps) == ("0.up:linear#0", "linear", 0)


def tensor_parallel(cluster: Cluster) -> Decisions:
    """All products split over the whole cluster."""
    mesh = Mesh((MeshAxis("tensor", tuple(reversed(cluster.prime_axes()))),))
    factors = (("n", "up:linear#0"), ("d1", "act:relu#0"), ("k", "down:linear#0"))
    nodes = tuple(
        NodeDecision(f"{i}.{key}", ((f, ("tensor",)),)) for i in range(DEPTH) for f, key in factors
    )
    return Decisions(one_stage(mesh), nodes)


def test_tensor_parallel_collectives_wait_and_are_waited_for() -> None:
    cluster = load_cluster("4xH100")
    decisions, graph = tensor_parallel(cluster), model()
    found = run(graph, cluster, decisions)
    price = price_plan(lower(graph, decisions), cluster, decisions, Optimizer("adamw", 2))
    assert found.step_s == pytest.approx(price.step_s, rel=1e-6)
    sent = sum(found.busy().values()) - found.busy()[COMPUTE]
    assert found.exposed() == {"activations all_reduce": sent}
    assert found.step_ps == found.busy()[COMPUTE] + sent


def test_zero_3_gathers_one_unit_ahead() -> None:
    cluster = load_cluster("2x4xH100")
    decisions = chunked(cluster)
    found = run(model(), cluster, decisions)
    gathers = [s for s in played(found, "data (weights)") if s.kind == "weights all_gather"]
    order = [*range(DEPTH), *reversed(range(DEPTH - 1))]
    assert [s.name for s in gathers] == [f"gather {i} {i}" for i in order]
    computed = played(found, COMPUTE)
    first = {i: next(s for s in computed if s.name.startswith(f"{i}.")) for i in range(DEPTH)}
    for index in range(1, DEPTH):
        # Launched when the unit before it begins, behind its own gather.
        assert gathers[index].start_ps == max(gathers[index - 1].end_ps, 0)
        if index > 1:
            assert gathers[index].start_ps <= first[index - 1].start_ps
        assert gathers[index].end_ps <= first[index].start_ps
    assert first[0].start_ps == gathers[0].end_ps
    reduced = [s for s in played(found, "data (weights)") if s.kind == "gradients reduce_scatter"]
    assert [s.name for s in reduced] == [f"reduce {i} {i}" for i in reversed(range(DEPTH))]
    assert set(found.exposed()) <= {"weights all_gather", "gradients reduce_scatter"}
    # At most three gathered units are there at once: one read, one unpacked, one under way.
    unit = 2 * 2048 * 512 * 4
    assert found.processes[0].memory.peaks[COMPONENTS.index("communication")] <= 5 * unit


def test_activations_do_not_wait_for_weights_that_travel_over_the_same_axis() -> None:
    cluster = load_cluster("2x4xH100")
    plain = chunked(cluster)
    nodes = tuple(
        replace(node, factors=(("d1", ("data",)),)) if "relu" in node.key else node
        for node in plain.nodes
    )
    found = run(model(), cluster, replace(plain, nodes=nodes))
    moved = [s for s in played(found, "data") if s.kind == "activations all_to_all"]
    assert len(moved) == 4 * DEPTH  # to the ReLU and back, in both passes
    alone = min(s.end_ps - s.start_ps for s in moved)
    weights = played(found, "data (weights)")
    beside = [
        s for s in moved if any(w.start_ps < s.end_ps and s.start_ps < w.end_ps for w in weights)
    ]
    assert beside
    assert all(s.end_ps - s.start_ps <= 2 * alone for s in moved)  # they share the link
    assert found.exposed()["activations all_to_all"] == sum(s.end_ps - s.start_ps for s in moved)


def test_gradients_are_reduced_in_buckets_in_the_last_backward_pass() -> None:
    cluster = load_cluster("2x4xH100")
    decisions = chunked(cluster, level=0, num_microbatches=2)
    graph = model()
    found = run(graph, cluster, decisions)
    pcg = lower(graph, decisions)
    buckets = priced(pcg, cluster, decisions, Optimizer("adamw", 2)).buckets
    assert sum(len(bucket.parameters) for bucket in buckets) == 2 * DEPTH
    reduced = [s for s in played(found, "data (weights)") if s.kind == "gradients all_reduce"]
    assert [s.name for s in reduced] == [bucket.name for bucket in buckets]
    spans = {span.name: span for span in found.processes[0].spans}
    assert reduced[0].start_ps > spans["B last"].start_ps
    alone = [picoseconds(bucket.exchanges[0].seconds) for bucket in buckets]
    assert [s.end_ps - s.start_ps for s in reduced] == alone
    assert spans["STEP"].start_ps == reduced[-1].end_ps
    # Nothing waits for them but the step.
    assert found.exposed() == {
        "gradients all_reduce": reduced[-1].end_ps - spans["REDUCE"].start_ps
    }


def test_zero_1_gathers_weights_at_the_end() -> None:
    cluster = load_cluster("2x4xH100")
    found = run(model(), cluster, chunked(cluster, level=1))
    assert found.processes[0].spans[-1].name == "GATHER"
    assert found.exposed()["weights all_gather"] == found.processes[0].spans[-1].played.ps > 0


def test_states_across_nodes_pay_over_slow_links() -> None:
    """With two microbatches: weights and gradients within nodes, and states in chunks across them,
    send less over a slow network than ZeRO-3, and store fewer states than ZeRO-3 within nodes.
    """
    cluster = load_cluster("2x4xH100")
    slow = replace(
        cluster.levels[1], link=replace(cluster.levels[1].link, bandwidth_bytes_per_s=1e9)
    )
    cluster = replace(cluster, levels=(cluster.levels[0], slow))
    mesh = next(m for m in logical_meshes(cluster) if [a.size for a in m.axes] == [2, 4])
    flat = chunked(cluster, num_microbatches=2)
    nodes = tuple(NodeDecision(n.key, (("d0", ("x", "y")),)) for n in flat.nodes)
    found = {}
    for chunks in (("xy", "xy", "xy"), ("y", "y", "y"), ("y", "y", "yx")):
        storage = [Storage(tuple(axes)) for axes in chunks]
        stored = tuple(ParameterDecision(p.name, *storage) for p in flat.parameters)
        plan = replace(flat, stages=one_stage(mesh), nodes=nodes, parameters=stored)
        found[chunks[0], chunks[2]] = run(model(), cluster, plan)
    across, within, both = found.values()
    assert both.step_ps < across.step_ps
    assert both.step_ps <= within.step_ps * 1.01
    states = COMPONENTS.index("optimizer")
    assert 2 * both.processes[0].base[states] == within.processes[0].base[states]


def test_chunked_gradients_go_on_into_the_next_microbatch() -> None:
    cluster = load_cluster("2x4xH100")
    steps = 4
    decisions = chunked(cluster, num_microbatches=steps)
    found = run(model(), cluster, decisions)
    names = [span.name for span in found.processes[0].spans]
    assert names == [*["F", "B"] * (steps - 1), "F", "B last", "REDUCE", "STEP", "GATHER"]
    reduced = [s for s in played(found, "data (weights)") if s.kind == "gradients reduce_scatter"]
    assert len(reduced) == steps * DEPTH
    spans = found.processes[0].spans
    assert any(span.played.state for span in spans if span.name == "B")
    assert not spans[-1].played.state
    assert (
        found.processes[0].memory.net
        == step_tasks(lower(model(), decisions), cluster, decisions, Optimizer("adamw", 2)).base
    )


def with_host(cluster: Cluster) -> Cluster:
    return replace(cluster, host=Host(2**40, cluster.num_devices, Link(50e9, 1e-6)))


def test_offloaded_activations_leave_and_come_back() -> None:
    cluster = with_host(load_cluster("1xH100"))
    offload = tuple(ActivationDecision(str(i), "offload") for i in range(DEPTH))
    kept = run(model(), cluster, Decisions())
    found = run(model(), cluster, Decisions(activations=offload))
    size = 64 * 2048 * 4  # what relu keeps of a block; its input is the result of another
    each = picoseconds(size / 50e9) + 10**6
    out, back = played(found, "to host"), played(found, "from host")
    assert [s.name for s in out] == [f"offload {i}" for i in range(DEPTH)]
    assert [s.name for s in back] == [f"fetch {i}" for i in reversed(range(DEPTH))]
    assert {s.end_ps - s.start_ps for s in (*out, *back)} == {each}
    memory = COMPONENTS.index("activations")
    most, least = (t.processes[0].memory.peaks[memory] for t in (kept, found))
    assert least < most - (DEPTH - 4) * size
    bare = replace(cluster, host=None)
    with pytest.raises(InputError, match="has no host"):
        run(model(), bare, Decisions(activations=offload))


def test_optimizer_states_in_host_memory_come_and_go() -> None:
    cluster = with_host(load_cluster("2xH100"))
    decisions = chunked(cluster)
    away = Storage(("data",), 0, "host")
    parameters = tuple(replace(p, optimizer=away) for p in decisions.parameters)
    found = run(model(), cluster, replace(decisions, parameters=parameters))
    states = DEPTH * 2 * 2048 * 512 * 4 * 2 // 2  # two of each weight, on two devices
    for track in ("to host", "from host"):
        (moved,) = played(found, track)
        assert moved.end_ps - moved.start_ps == picoseconds(states / 50e9) + 10**6
    assert dict(zip(COMPONENTS, found.processes[0].base, strict=True))["optimizer"] == 0


def test_recomputation_has_memory_of_its_own() -> None:
    cluster = load_cluster("1xH100")
    again = tuple(ActivationDecision(str(i), "recompute") for i in range(DEPTH))
    kept = run(model(), cluster, Decisions())
    found = run(model(), cluster, Decisions(activations=again))
    assert found.step_ps > kept.step_ps
    line = dict(zip(COMPONENTS, found.processes[0].memory.peaks, strict=True))
    assert line["recomputation"] >= 64 * 2048 * 4
    before = dict(zip(COMPONENTS, kept.processes[0].memory.peaks, strict=True))
    assert line["activations"] < before["activations"]


def test_gradients_that_nobody_reduces_come_with_the_backward_pass() -> None:
    cluster, graph = load_cluster("1xH100"), model()
    each = 2048 * 512 * 4
    one = run(graph, cluster, Decisions())
    process = one.processes[0]
    gradients = COMPONENTS.index("gradients")
    assert process.base[gradients] == 0
    assert process.memory.peaks[gradients] == 2 * DEPTH * each
    # A second microbatch adds to them, and has one more while it does.
    two = run(graph, cluster, Decisions(num_microbatches=2))
    assert two.processes[0].memory.peaks[gradients] == (2 * DEPTH + 1) * each
    # The optimizer's denominators, for all weights at once.
    optimizer = COMPONENTS.index("optimizer")
    assert process.memory.peaks[optimizer] - process.base[optimizer] == 2 * DEPTH * each


def test_memory_line_leads_from_base_to_peak_and_back() -> None:
    cluster = load_cluster("2x4xH100")
    found = run(model(), cluster, chunked(cluster, num_microbatches=2))
    process = found.processes[0]
    held, peaks, now = list(process.base), list(process.base), 0
    for span in process.spans:
        for when, component, size in memory_line(span):
            assert when >= now
            now = when
            held[component] += size
            peaks[component] = max(peaks[component], held[component])
    assert tuple(held) == process.base
    assert tuple(peaks) == process.memory.peaks


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.sampled_from(["keep", "recompute"]))
def test_random_plans_respect_the_bound_and_lose_no_memory(
    seed: int, microbatches: int, policy: str
) -> None:
    graph, cluster = model(3), load_cluster("4xH100")
    plan = random_plan(graph, factorize(graph), grid({"x": 2, "y": 2}), seed, microbatches)
    activations = tuple(ActivationDecision(str(i), policy) for i in range(2))
    decisions = replace(plan, activations=activations)
    pcg = lower(graph, decisions)
    tasks = step_tasks(pcg, cluster, decisions)
    found = Simulator().play(tasks)
    # What is played is what is summed up.
    summed = price_plan(pcg, cluster, decisions).price.compute_s
    slowed = sum(
        ps
        for span in found.processes[0].spans
        for piece in span.played.pieces
        for _, ps in piece.outcome.slowed[0]
    )
    assert found.busy()[COMPUTE] - slowed == pytest.approx(summed * 1e12, rel=1e-6)
    assert slowed <= BACKENDS["nccl"].slows * summed * 1e12 + len(tasks.actions)
    assert 0 < found.bound_ps <= found.step_ps
    assert found.processes[0].memory.net == tasks.base
    busy = found.busy()
    assert max(busy.values()) <= found.step_ps
    assert busy[COMPUTE] + sum(found.exposed().values()) == found.step_ps


def stage_of(
    pcg: PCG,
    cluster: Cluster,
    decisions: Decisions,
    optimizer: Optimizer | None = None,
    split: bool = False,
    split_s: float = 0.0,
) -> StageActions:
    """The actions of a program that is one stage."""
    kernels = Kernels(cluster.device, replace(OWN, split_s=split_s))
    stage = StageWriter(pcg, cluster, priced(pcg, cluster, decisions, optimizer, kernels))
    return play_stage("all", stage, Simulator(), split=split)


def test_a_pipeline_of_one_stage_is_the_step() -> None:
    cluster = load_cluster("4xH100")
    decisions = replace(chunked(cluster, level=0), num_microbatches=4)
    graph = model()
    pcg = lower(graph, decisions)
    whole = run(graph, cluster, decisions)
    stage = stage_of(pcg, cluster, decisions, Optimizer("adamw", 2))
    found = simulate_pipeline(schedule("1f1b", 1, 4), [stage])
    assert found.step_ps == whole.step_ps
    assert found.exposed() == whole.exposed()
    assert found.processes[0].memory == whole.processes[0].memory


def test_the_bound_of_a_pipeline_is_without_what_might_be_hidden() -> None:
    cluster = load_cluster("4xH100")
    decisions = tensor_parallel(cluster)
    stage = stage_of(lower(model(), decisions), cluster, decisions)
    found = simulate_pipeline(schedule("1f1b", 2, 4), [stage, stage])
    assert found.exposed(0)["activations all_reduce"] > 0
    with_waits = sum(span.played.ps for span in found.processes[0].spans)
    assert found.bound_ps == max(found.busy(0).values()) < with_waits


def test_a_split_backward_pass_is_as_long_as_a_whole_one() -> None:
    cluster, decisions = load_cluster("1xH100"), Decisions(num_microbatches=2)
    pcg = lower(model(), decisions)
    whole = stage_of(pcg, cluster, decisions)
    split = stage_of(pcg, cluster, decisions, split=True)
    halves = split.actions["B"].ps + split.actions["W"].ps
    assert halves == pytest.approx(whole.actions["B"].ps, abs=100)
    # Nobody wants the gradient of what the first product reads.
    assert halves / 3 < split.actions["W"].ps < 0.6 * halves
    # Until W there is all that was kept, and the gradients that flow into products.
    early, late = (split.actions[kind].memory.net for kind in "BW")
    assert tuple(map(sum, zip(early, late, strict=True))) == whole.actions["B"].memory.net
    assert early[ACTIVATIONS] > 0
    assert not any(size for component, size in enumerate(early) if component != ACTIVATIONS)
    found = simulate_pipeline(schedule("zb_h1", 3, 2), [split] * 3)
    assert found.step_ps < simulate_pipeline(schedule("1f1b", 3, 2), [whole] * 3).step_ps


def test_passes_of_weights_wait_for_their_processor() -> None:
    """A GPU waits where its kernels are short; a processor issues nothing meanwhile."""
    decisions = Decisions(num_microbatches=2)
    pcg, readers, late_s = lower(model(), decisions), 2 * DEPTH, 1e-3
    for name in ("1xH100", "1xcpu"):
        cluster = load_cluster(name)
        free, short, long = (
            stage_of(pcg, cluster, decisions, split=True, split_s=s).actions
            for s in (0, 1e-9, late_s)
        )
        for kind in ("F", "B"):
            assert free[kind].ps == short[kind].ps == long[kind].ps
        before = free["W"].ps if name == "1xcpu" else 0
        whole = before + picoseconds(readers * late_s)
        assert long["W"].ps == pytest.approx(whole, rel=0.01)
        assert (short["W"].ps == free["W"].ps) is (name == "1xH100")


def test_a_machine_far_too_slow_is_refused_in_words() -> None:
    """Sums of 64 bits would not hold its picoseconds."""
    cluster = load_cluster("2xcpu")
    device = replace(cluster.device, flops_per_s=(("float32", 1.0),), memory_bytes_per_s=1.0)
    slow = replace(cluster, device=device)
    said = r"would take .* s: is a rate, a bandwidth or a latency of the cluster far too low"
    asked = Request(model(), DataSheets(slow), Optimizer("sgd", 0), device.memory_bytes)
    with pytest.raises(InputError, match=said):
        candidates(replace(asked, method="auto"), lambda text: None)
    with pytest.raises(InputError, match=said):
        run(model(), slow, Decisions(one_stage(grid({"x": 2}))))
