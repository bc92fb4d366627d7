"""Stages of comparators: the dynamic program against all splits, and stages of the models."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parloom.comparators.pipelines import split
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError, LayoutError, VerifyError
from parloom.ir.action_lists import check_lists, parse_action
from parloom.ir.graph import Graph
from parloom.ir.lower_stages import group_lists, lower_stages, rank_devices
from parloom.ir.mesh import Cluster, Mesh, grid
from parloom.ir.pcg import TIME
from parloom.ir.plan import Decisions, ModelSource, Optimizer, Plan, Stage
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.regular_parts import crossed
from parloom.ir.schedules import schedule, stage_depths
from parloom.ir.stages import cut, stage_items
from parloom.ir.verify import verify_decisions
from parloom.search.pipelines.costs import ItemCosts, Sent
from parloom.search.pipelines.split import Split, closed_forms
from tests.dist import lowered, staged
from tests.dist.staged import even

times = st.lists(st.integers(1, 50), min_size=1, max_size=5)
others = st.lists(st.integers(0, 20), min_size=5, max_size=5)


def costs_of(
    passes: list[int], once: list[int], after: list[int], sizes: list[int], cluster: Cluster
) -> dict[int, ItemCosts]:
    count = len(passes)
    nothing = np.zeros(count, dtype=np.int64)
    whole = Decisions(num_microbatches=3)

    def sent(size: int) -> Iterator[Sent]:
        for index, ps in enumerate(after[: count - 1]):
            times = tuple(-(-ps * f // size) for f in (1, 3))
            yield Sent(index, (index + 1,), times[: len(cluster.levels)], None)

    return {
        size: ItemCosts(
            whole,
            tuple(map(str, range(count))),
            passes_ps=-(-np.array(passes) // size),
            once_ps=nothing if size == 1 else np.array(once[:count]),
            kept_bytes=nothing,
            stored_bytes=nothing,
            buffer_bytes=nothing,
            passing_bytes=nothing,
            stage_ps=size,
            sent=tuple(sent(size)),
            shared_ps=(),
            updating_bytes=nothing,
        )
        for size in sizes
    }


def slowest(
    costs: dict[int, ItemCosts], found: list[tuple[int, int, int]], cluster: Cluster
) -> float:
    """The slowest stage, or boundary: over the links that stages at both ends of it are joined by,
    at the end that has fewer devices.
    """
    worst, device = 0, 0
    before: tuple[range, int] | None = None
    for first, last, size in found:
        own, devices = costs[size], range(device, device + size)
        worst = max(worst, int(own.adds_ps[first:last].sum()) + own.stage_ps)
        if before is not None:
            level = crossed((before[0], devices), cluster)
            for end in (own, costs[before[1]]):
                worst = max(worst, 3 * sum(s.ps[level] for s in end.sent if s.source == first - 1))
        device, before = device + size, (devices, size)
    return worst


@given(
    times,
    st.lists(st.integers(0, 20), min_size=5, max_size=5),
    st.sampled_from(["1xH100", "2xH100", "3xH100", "4xH100", "2x2xH100"]),
)
def test_the_split_is_the_best_of_all(passes: list[int], other: list[int], name: str) -> None:
    cluster = load_cluster(name)
    devices = cluster.num_devices
    sizes = [size for size in (1, 2, 4) if size <= devices]
    costs = costs_of(passes, other, other[::-1], sizes, cluster)
    best = None
    for stages in range(1, len(passes) + 1):
        for ends in combinations(range(1, len(passes)), stages - 1):
            bounds = [0, *ends, len(passes)]
            for chosen in product(sizes, repeat=stages):
                begins = [sum(chosen[:i]) for i in range(stages)]
                lies_well = all(b % size == 0 for b, size in zip(begins, chosen, strict=True))
                if sum(chosen) == devices and lies_well:
                    plan = [(bounds[i], bounds[i + 1], chosen[i]) for i in range(stages)]
                    value = slowest(costs, plan, cluster)
                    best = value if best is None else min(best, value)
    found = split(costs, cluster)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert sum(size for *_, size in found) == devices
    assert [first for first, *_ in found] == [0, *(last for _, last, _ in found[:-1])]
    assert slowest(costs, found, cluster) == pytest.approx(best)


def gpt() -> Graph:
    return lowered.model("gpt").graph


def test_free_items_are_in_every_stage_that_reads_them() -> None:
    """Positions and counts of tokens depend on no parameter; what crosses is made by one stage."""
    graph = gpt()
    items = stage_items(graph)
    parts = cut(graph, [items[:2], items[2:]])
    names = {item.results[0].name for item in graph.main.body if item.results}
    made = [{v.name for i in own.main.body for v in i.results} for own in parts.graphs]
    assert made[0] | made[1] == names
    for crossing in parts.crossings:
        assert crossing.value.name in made[crossing.source]
        assert all(crossing.value.name not in made[target] for target in crossing.targets)


def test_what_crosses_is_on_no_two_ranks_twice() -> None:
    graph = gpt()
    items = stage_items(graph)
    stages = (
        Stage(items[:2], (range(2),), grid({"x": 2})),
        Stage(items[2:], (range(2, 6),), grid({"x": 2, "y": 2})),
    )
    found = lower_stages(graph, Decisions(stages, num_microbatches=3, schedule="1f1b"))
    sender, receiver = found.pcgs
    arriving = {v.name: v for v in receiver.main.inputs}
    wide = [v for v in zip(sender.graph.leaving, sender.leaving, strict=True) if v[1].layout.axes]
    assert wide
    for name, value in wide:
        # What is made of parameters alone is not cut in time.
        assert set(value.layout.axes) - {TIME} == {"x"}
        assert set(arriving[name].layout.axes) - {TIME} == {"x", "y"}
        assert value.layout.shard(TIME) == arriving[name].layout.shard(TIME)


def test_ranks_of_a_group_have_the_same_list() -> None:
    graph = gpt()
    items = stage_items(graph)
    half = len(items) // 4
    pieces = [items[i * half : (i + 1) * half] for i in range(3)] + [items[3 * half :]]
    stages = tuple(Stage(p, (range(i % 2, i % 2 + 1),), Mesh(())) for i, p in enumerate(pieces))
    plan = Decisions(stages, num_microbatches=2, schedule="interleaved_1f1b")
    assert [group for group, _ in group_lists(plan)] == [(0, 2), (1, 3)]
    verify_decisions(graph, plan)


def test_stages_of_a_group_lie_alike() -> None:
    """A rank of two stages is one process, on one device."""
    graph, mesh = gpt(), grid({"x": 2})
    swapped = replace(mesh, order=(1, 0))
    groups = range(2), range(2, 4)
    stages = tuple(
        Stage(own, (groups[i % 2],), swapped if i % 2 else mesh)
        for i, own in enumerate(even(graph, 4))
    )
    plan = Decisions(stages, num_microbatches=2, schedule="interleaved_1f1b")
    verify_decisions(graph, plan)
    assert rank_devices(plan) == (0, 1, 3, 2)
    other = replace(plan, stages=(*stages[:3], replace(stages[3], mesh=mesh)))
    with pytest.raises(VerifyError, match="share devices 2 to 3 and lie on them otherwise"):
        verify_decisions(graph, other)
    beside = replace(plan, stages=(*stages[:3], replace(stages[3], devices=(range(1, 3),))))
    with pytest.raises(VerifyError, match="share device 1 and not all of theirs"):
        verify_decisions(graph, beside)


@pytest.mark.parametrize(
    ("devices", "schedule", "said"),
    [
        ((range(1), range(1, 2)), "1f1c", "no schedule '1f1c'"),
        ((range(1), range(1, 2)), "one_stage", "one_stage is for one stage, not 2"),
    ],
)
def test_plans_of_stages_that_cannot_run(
    devices: tuple[range, range], schedule: str, said: str
) -> None:
    graph = gpt()
    items = stage_items(graph)
    stages = tuple(
        Stage(own, (d,), Mesh(())) for own, d in zip((items[:2], items[2:]), devices, strict=True)
    )
    with pytest.raises(VerifyError, match=said):
        verify_decisions(graph, Decisions(stages, schedule=schedule))


def test_a_cut_of_a_block_is_refused_by_the_operator_s_name() -> None:
    graph = gpt()
    items = stage_items(graph)
    with pytest.raises(LayoutError, match=r"is inside of the block blocks.0, .* name blocks.0"):
        cut(graph, [items[:2], (*items[2:], "blocks.0.attention:linear#0")])


V_SHAPE = (
    "F0 3F0 3B0 B0 F1 3F1 3B1 B1 REDUCE STEP GATHER",
    "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 REDUCE STEP GATHER",
)


def v_shaped(*lists: str) -> Decisions:
    """Four stages on two devices: the first and the last one share theirs."""
    graph = gpt()
    items = stage_items(graph)
    quarter = len(items) // 4
    pieces = [items[i * quarter : (i + 1) * quarter] for i in range(3)] + [items[3 * quarter :]]
    places = (0, 1, 1, 0)
    stages = tuple(
        Stage(own, (range(d, d + 1),), Mesh(())) for own, d in zip(pieces, places, strict=True)
    )
    actions = tuple(tuple(map(parse_action, text.split())) for text in lists)
    return Decisions(stages, num_microbatches=2, schedule="v", actions=actions)


def test_lists_of_a_plan_are_run_wherever_stages_lie() -> None:
    plan = v_shaped(*V_SHAPE)
    verify_decisions(gpt(), plan)
    assert [group for group, _ in group_lists(plan)] == [(0, 3), (1, 2)]
    assert " ".join(map(str, group_lists(plan)[1][1])) == V_SHAPE[1]
    report = staged.report(lowered.model("gpt"), plan, staged.reference("gpt"))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("3B1 B1", "B1 3B1", r"wait for each other: B1 waits for 1B1, 1B1 waits for 2B1, .*|wait"),
        ("1F1 2F1", "1F1", "lacks 2F1: 2 microbatches run F and B each"),
        ("3B0 B0", "3B0 B0 B0", "has B0 2 times; leave one"),
        ("3B0 B0", "3B0 B0 W0", "lacks W1: 2 microbatches run F, B and W each"),
        ("1F1 2F1", "1F1 2F1 5F1", "has 5F1, which is not its to run"),
        ("1B1 REDUCE STEP GATHER", "1B1 REDUCE STEP", "ends with REDUCE STEP, not REDUCE STEP GA"),
    ],
)  # fmt: skip
def test_lists_that_do_not_run_a_step(old: str, new: str, said: str) -> None:
    lists = [text.replace(old, new, 1) for text in V_SHAPE]
    assert lists != list(V_SHAPE)
    with pytest.raises(VerifyError, match=said):
        verify_decisions(gpt(), v_shaped(*lists))


@given(st.data())
def test_closed_forms_of_many_splits_are_those_of_each(data: st.DataObject) -> None:
    """Values with several readers, also beyond the next stage, and weights of several items."""
    count = data.draw(st.integers(4, 7))
    ints = st.integers(0, 30)

    def each() -> NDArray[np.int64]:
        return np.array(data.draw(st.lists(ints, min_size=count, max_size=count)), dtype=np.int64)

    values = []
    for source in data.draw(st.lists(st.integers(0, count - 2), max_size=6)):
        targets = data.draw(st.sets(st.integers(source + 1, count - 1), min_size=1, max_size=3))
        forward, back = data.draw(ints), data.draw(st.none() | ints)
        backward = None if back is None else (back,)
        values.append(Sent(source, tuple(sorted(targets)), (forward,), backward))
    nothing = np.zeros(count, dtype=np.int64)
    costs = ItemCosts(
        Decisions(num_microbatches=data.draw(st.integers(1, 5))), tuple(map(str, range(count))),
        passes_ps=each(), once_ps=each(), kept_bytes=nothing, stored_bytes=nothing,
        buffer_bytes=nothing, passing_bytes=nothing, stage_ps=data.draw(ints), sent=tuple(values),
        shared_ps=((0, count - 1, data.draw(ints)),), updating_bytes=nothing,
    )  # fmt: skip
    owner = data.draw(st.sampled_from([(0, 1), (0, 1, 0), (0, 1, 1, 0), (0, 1, 2)]))
    cuts = list(combinations(range(1, count), len(owner) - 1))
    found = closed_forms(costs, np.array([[*inner, count] for inner in cuts]), np.array(owner))
    for inner, step in zip(cuts, found, strict=True):
        alone = Split((*inner, count), owner, (costs,) * (max(owner) + 1))
        assert step == pytest.approx(alone.step_ps, rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 7), st.data())
def test_lists_of_stages_that_are_no_chain(stages: int, count: int, data: st.DataObject) -> None:
    """Each warms up by its depth: it holds no more microbatches than are needed."""
    pairs = list(combinations(range(stages), 2))
    edges = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    depths = stage_depths(stages, edges)
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        lists = schedule(name, stages, count, edges=edges)
        check_lists(
            [[i] for i in range(stages)],
            lists,
            [(a, b, True) for a, b in edges],
            [range(count)] * stages,
        )
        if name == "1f1b":
            warm = [[a.kind for a in own].index("B") for own in lists]
            assert warm == [min(depth, count) for depth in depths]


def test_branches_warm_up_less_than_a_row() -> None:
    """A chain has the lists that it has without edges; branches warm up less than in a row."""
    chain = [(i, i + 1) for i in range(3)]
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        assert schedule(name, 4, 5, edges=chain) == schedule(name, 4, 5)
    branches = schedule("1f1b", 4, 5, edges=[(0, 3), (1, 3), (2, 3)])
    assert [" ".join(map(str, own[:3])) for own in branches] == [
        "F0 F1 B0", "1F0 1F1 1B0", "2F0 2F1 2B0", "3F0 3B0 3F1",
    ]  # fmt: skip
    with pytest.raises(InputError, match="interleaved_1f1b is for chains"):
        schedule("interleaved_1f1b", 4, 4, 2, edges=chain)


def test_the_lists_of_all_schedules_run_a_step() -> None:
    for name in ("gpipe", "1f1b", "zb_h1", "zb_h2"):
        for stages, count in product((1, 2, 4), (1, 3, 8)):
            lists = schedule(name, stages, count)
            edges = [(i, i + 1, True) for i in range(stages - 1)]
            check_lists([[i] for i in range(stages)], lists, edges, [range(count)] * stages)
    lists = schedule("interleaved_1f1b", 6, 4, 3)
    check_lists([[0, 2, 4], [1, 3, 5]], lists, [(i, i + 1, True) for i in range(5)], [range(4)] * 6)


@pytest.mark.parametrize("text", ["F", "B-1", "X0", "2 F0", "F0.5", "step", "1234567F0"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(InputError, match="no action"):
        parse_action(text)


def test_a_plan_of_stages_and_lists_comes_back_from_its_file() -> None:
    plan = Plan(
        ModelSource("zoo:gpt"), "2xcpu", "0" * 16, Optimizer(), "by hand", v_shaped(*V_SHAPE), ""
    )
    text = plan_to_json(plan)
    assert plan_from_json(text, "here").decisions == plan.decisions
    with pytest.raises(InputError, match=r"decisions\.actions\.0: no action 'F00x'"):
        plan_from_json(text.replace('"F0 3F0', '"F00x 3F0'), "here")
