"""Decisions in words."""

from dataclasses import replace
from itertools import product

import pytest

from parloom.answer import ALL
from parloom.comparators.baselines import data_parallel, fsdp, megatron
from parloom.cost.clusters import load_cluster
from parloom.cost.devices import find_device
from parloom.cost.measured import Source
from parloom.ir.expected import Constraint, Prediction
from parloom.ir.fold import unfold
from parloom.ir.graph import Function, Graph, Node
from parloom.ir.mesh import Device, Mesh, MeshAxis, PrimeAxis, grid
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    ParameterDecision,
    Stage,
    Storage,
    one_stage,
)
from parloom.ir.stages import stage_items
from parloom.report.instead import instead_words
from parloom.report.words import (
    constraint_line,
    idle_axes,
    idle_words,
    links_of,
    memory_limit,
    memory_words,
    rate_words,
    splits,
    tight_words,
    uncalibrated_words,
    uneven_words,
    words,
)
from parloom.rewrite.rewrites import rewritten
from parloom.search.pins import parse_pin
from parloom.search.quantized import in_int8
from tests.unit.graphs import cluster, graph, node, perceptron, stack
from tests.unit.test_plan_json import example

CLUSTER = cluster(2, 2)
SAME = "take h in main by linear_mul_30f5f6_0p5: linear(x, mul(w, 0.5))"
OTHER = "take h in main by linear_add_954517: mul(linear(x, w), 0.5)"


def test_what_travels_in_int8() -> None:
    """Weights that are gathered after the update are sent as they are."""
    (sharded,) = fsdp(perceptron(), CLUSTER)
    (kept,) = data_parallel(perceptron(), CLUSTER)
    for plan, said in (
        (sharded, "3 gradients and 3 gathered weights travel in int8"),
        (kept, "3 gradients travel in int8"),
    ):
        assert said in words(perceptron(), in_int8(plan, perceptron()))


def test_what_trains_nothing_has_no_optimizer_state() -> None:
    found = perceptron()
    still = replace(found, inputs=tuple(replace(own, trainable=False) for own in found.inputs))
    (plan,) = fsdp(found, CLUSTER)
    assert "weights of 3 parameters stored in parts over data" in words(still, plan)
    updated = tuple(replace(p, weight=Storage(), gradient=Storage()) for p in plan.parameters)
    said = words(still, replace(plan, parameters=updated))
    assert "every device stores all weights" in said


def test_samples_are_followed_to_the_loss() -> None:
    (plan,) = data_parallel(perceptron(), CLUSTER)
    assert words(perceptron(), plan) == (
        "axis data over 4 devices splits samples in 5 operators",
        "every device stores all weights, with their gradients and optimizer state",
    )
    (plan,) = fsdp(perceptron(), CLUSTER)
    line = "weights, gradients and optimizer state of 3 parameters stored in parts over data"
    assert line in words(perceptron(), plan)
    parts, whole = Storage(("data",)), Storage()
    own = ParameterDecision("up", whole, whole, parts)
    kept = tuple(p for p in plan.parameters if p.name != "up")
    mixed = words(perceptron(), replace(plan, parameters=(own, *kept)))
    assert mixed[1:] == (
        "weights, gradients and optimizer state of 2 parameters stored in parts over data",
        "optimizer state of 1 parameter stored in parts over data",
    )


def test_stages_of_a_padded_vocabulary() -> None:
    """Stages are of the graph that has the padding already."""
    padded = stack(2, vocab=63)
    plan = next(p for p in megatron(padded, CLUSTER) if p.mesh["tensor"].size == 2)
    assert plan.rewrites
    items = stage_items(rewritten(padded, plan.rewrites))
    mesh = Mesh((plan.mesh["tensor"],))
    stages = (
        Stage(items[:2], (range(2),), mesh),
        Stage(items[2:], (range(2, 4),), mesh),
    )
    first, *lines = words(padded, replace(plan, stages=stages, nodes=(), parameters=()))
    assert first.startswith("2 stages")
    assert [line.partition(":")[0] for line in lines[:2]] == ["stage 0", "stage 1"]


def test_features_are_born_at_weights_and_end_at_weights() -> None:
    two, _ = megatron(perceptron(), CLUSTER)
    data, tensor, stored = words(perceptron(), two)
    assert data == "axis data over 2 devices splits samples in 5 operators"
    assert tensor == (
        "axis tensor over 2 devices splits output features in 2 operators,"
        " input features in 1 operator"
    )
    assert stored.startswith("every device stores its part of the split weights and all others,")


def test_what_has_no_name_is_a_dim() -> None:
    mesh = grid({"x": 2})
    hand = graph(
        {"up": (8, 6)},
        {"x": ((4, 6), "float32")},
        node("zeros", (4, 8), to="made", shape=(4, 8)),
        node("linear", "x", "up", to="y", shape=(4, 8), path="up"),
        node("add", "y", "made", to="both", shape=(4, 8)),
        node("sum", "both", to="loss", shape=()),
    )
    assert words(hand, Decisions(one_stage(mesh), (NodeDecision(":zeros#0", (("d0", ("x",)),)),)))[
        0
    ] == ("axis x over 2 devices splits dim 0 of the result in 1 operator")


def test_names_go_with_values_however_they_lie() -> None:
    """Samples are samples where an operator before them was split otherwise."""
    mesh = grid({"x": 2})
    nodes = (
        NodeDecision("down:linear#0", (("n", ("x",)),)),
        NodeDecision(":mul#0", (("d0", ("x",)),)),
        NodeDecision(":mean#0", (("d1", ("x",)),)),
    )
    assert words(perceptron(), Decisions(one_stage(mesh), nodes))[0] == (
        "axis x over 2 devices splits output features in 2 operators, samples in 1 operator"
    )


def test_views_and_positions() -> None:
    mesh, model = grid({"x": 2, "y": 2, "z": 2}), stack(1)
    nodes = (
        NodeDecision("blocks.0.up:linear#0", (("d0", ("x",)), ("d1", ("y",)), ("n", ("z",)))),
        NodeDecision(":view#0", (("f0", ("x",)), ("f1", ("y",)))),
        NodeDecision(":cross_entropy_loss#0", (("n0", ("x",)), ("n1", ("y",)), ("c", ("z",)))),
    )
    assert words(model, Decisions(one_stage(mesh), nodes))[:3] == (
        "axis x over 2 devices splits samples in 3 operators",
        "axis y over 2 devices splits positions in 3 operators",
        "axis z over 2 devices splits output features in 2 operators",
    )


def test_recomputed_blocks_are_counted_among_all() -> None:
    again = (ActivationDecision("blocks.0", "recompute"), ActivationDecision("blocks.1"))
    assert "recompute activations of 1 of 3 blocks" in words(
        stack(3), Decisions(one_stage(grid({"x": 1})), activations=again)
    )
    values = ActivationDecision("blocks.1", "recompute", ("act:gelu#0",))
    made = Decisions(one_stage(grid({"x": 1})), activations=(values,), rewrites=("block blocks.1",))
    assert "recompute some values of 1 of 1 block" in words(unfold(stack(3)), made)


def test_a_dtype_without_a_rate_is_priced_at_the_lowest() -> None:
    device = Device("odd", (("bfloat16", 9e12), ("float16", 8e12)), 2**30, 1e12)
    assert rate_words(perceptron(), device) == (
        "odd lists no rate for float32: priced at 8 TFLOP/s, its rate for float16, the lowest it"
        " lists",
    )
    known = replace(device, flops_per_s=(("float32", 1e12),))
    assert rate_words(perceptron(), known) == ()


def test_float16_is_named_where_a_device_has_no_bfloat16() -> None:
    """V100, T4 and 2080 Ti; a device that has neither is not told of it."""
    low = replace(perceptron(), functions=(), main=narrow(perceptron(), "bfloat16"))
    for name, rate in (("V100", "125"), ("T4", "65"), ("2080Ti", "53.8")):
        (line,) = rate_words(low, find_device(name).device)
        assert line.endswith(f"; --dtype fp16 computes at {rate} TFLOP/s")
        half = replace(low, main=narrow(perceptron(), "float16"))
        assert rate_words(half, find_device(name).device) == ()
    assert "fp16" not in rate_words(low, find_device("cpu").device)[0]


def narrow(graph: Graph, dtype: str) -> Function:
    """Main, with results in another dtype."""
    body = tuple(
        replace(
            item, results=tuple(replace(v, spec=replace(v.spec, dtype=dtype)) for v in item.results)
        )
        for item in graph.main.body
    )
    return replace(graph.main, body=body)


def test_an_axis_that_splits_nothing_is_idle() -> None:
    mesh = grid({"x": 2, "y": 3, "z": 1})
    plan = Decisions(one_stage(mesh), (NodeDecision("up:linear#0", (("d0", ("x",)),)),))
    assert [axis.name for axis in idle_axes(plan)] == ["y"]
    assert words(perceptron(), plan)[1:3] == (
        "axis y over 3 devices splits no operator: they all do the same work",
        "axis z over 1 device splits no operator",
    )
    assert idle_words(plan) == (
        "warning: axis y splits no operator: its 3 devices do the same work",
    )
    assert splits(plan)
    nothing = replace(plan, nodes=())
    assert not splits(nothing)
    (line,) = idle_words(nothing, "its batch is odd")
    what = "nothing is split: all 6 devices do all the work, no faster than one"
    assert line == f"warning: {what}; its batch is odd"


@pytest.mark.parametrize("given", ["45MB", "45000000"])
def test_memory_is_shown_beside_what_was_allowed(given: str) -> None:
    plan = replace(example(), constraints=(Constraint("--pin up=n:x", 1.0, 1),))
    assert memory_limit(plan, 2**32) == 2**32
    assert memory_words(2**22, 2**32, 2**32) == "4 MiB of 4 GiB per device (0.1%)"
    plan = replace(plan, constraints=(*plan.constraints, Constraint(f"--memory {given}", 1.0, 1)))
    limit = memory_limit(plan, 2**32)
    assert limit == 45_000_000
    said = memory_words(39 * 2**20, limit, 2**32)
    assert said == "39 MiB of 42.9 MiB allowed (90.9%; --memory: the device has 4 GiB)"


def test_the_links_of_an_axis_are_named() -> None:
    two, flat = megatron(perceptron(), CLUSTER)
    slow, fast = (level.name for level in reversed(CLUSTER.levels))
    data, tensor, _ = words(perceptron(), two, CLUSTER)
    assert data.startswith(f"axis data over 2 devices ({slow}) splits samples")
    assert tensor.startswith(f"axis tensor over 2 devices ({fast}) splits output features")
    assert f"4 devices ({slow}, {fast}) splits" in words(perceptron(), flat, CLUSTER)[0]


def test_the_links_of_an_axis_in_an_order_of_devices_are_those_of_its_groups() -> None:
    levels = load_cluster("TPU-v5e:2x4").levels
    short, long = (level.name for level in levels)
    nested = Mesh(
        (
            MeshAxis("x", (PrimeAxis(2, 4, 1),)),
            MeshAxis("y", (PrimeAxis(2, 2, 1), PrimeAxis(2, 1, 0))),
        )
    )
    columns = replace(nested, order=(0, 2, 4, 6, 1, 3, 5, 7))
    assert [links_of(nested, axis, levels) for axis in nested.axes] == [(long,), (long, short)]
    assert [links_of(columns, axis, levels) for axis in columns.axes] == [(short,), (long,)]
    # What `explain` writes is without the cluster.
    assert [links_of(columns, axis, ()) for axis in columns.axes] == [(), ()]


def test_what_one_flag_costs_and_what_several_cost() -> None:
    found = example().prediction
    assert found is not None
    step_s = found.step_s
    assert constraint_line(Constraint("--pin a=n", step_s, 1), found) == "--pin a=n costs nothing"
    assert constraint_line(Constraint(ALL, step_s, 1), found) == "all of these cost nothing"
    assert constraint_line(Constraint(ALL, 0.25, 1), found).startswith("all of these cost 50 ms")
    other = Constraint("--forbid rewrite=a", step_s, 1, "the same by other rules: b")
    assert constraint_line(other, found) == (
        "--forbid rewrite=a costs nothing; the same by other rules: b"
    )
    assert constraint_line(replace(other, step_s=0.25), found).endswith(
        " without; the same by other rules: b"
    )


@pytest.mark.parametrize(
    ("asked", "now", "said"),
    [
        ("rewrite=mul_linear_069230", SAME, "the same by other rules: linear_mul_30f5f6_0p5"),
        ("rewrite=mul_linear_*", OTHER, "other rules for h: linear_add_954517"),
        ("rewrite=mul_linear_8c707d", SAME, ""),
        ("rewrite=mul_linear_069230", SAME.replace("in main", "in block"), ""),
        ("rewrite=mul_linear_069230", SAME.replace("take h", "take g"), ""),
        ("h=replicated", SAME, ""),
    ],
)
def test_what_comes_back_by_other_rules_is_said(asked: str, now: str, said: str) -> None:
    pin = parse_pin(asked, forbidden=True)
    gone = "take h in main by mul_linear_069230_0p5: linear(x, mul(w, 0.5))"
    found = replace(example().decisions, rewrites=(now,))
    assert instead_words([pin], [gone], found) == said
    assert instead_words([replace(pin, forbidden=False)], [gone], found) == ""


@pytest.mark.parametrize(("planned", "here"), list(product(("spec", "measured"), repeat=2)))
def test_a_calibrated_plan_without_its_calibration_is_warned_of(planned: str, here: str) -> None:
    plan = replace(example(), prediction=Prediction(2.0, 1, source=planned))
    said = uncalibrated_words(plan, Source(here, 0.1))
    assert ("predicted to take 2 s (measured)" in said) == (planned != "spec" and here == "spec")
    assert bool(said) == (planned != "spec" and here == "spec")
    assert not uncalibrated_words(replace(plan, prediction=None), Source("spec", 0.1))


def test_a_batch_that_does_not_divide_is_said() -> None:
    (line,) = uneven_words(30, 8)
    assert line == "30 samples do not divide over 8 devices; a batch of 24 or 32 would"
    assert not uneven_words(32, 8)
    assert not uneven_words(4, 8)  # other dims are split


def test_stages_that_split_the_same_are_one_line() -> None:
    """Stages one after the other, on devices that take them by turns."""
    model, pair = stack(4), grid({"x": 2})
    items = stage_items(model)
    cuts = [items[:1], *((items[i],) for i in range(1, 5)), items[5:]]
    stages = tuple(
        Stage(own, (range(begin, begin + 2),), pair)
        for own, begin in zip(cuts, [0, 2, 0, 2, 0, 2], strict=True)
    )
    same = "axis x over 2 devices splits no operator: they all do the same work"
    assert words(model, Decisions(stages, schedule="1f1b")) == (
        "6 stages, schedule 1f1b",
        "stages 0 to 4: tokens:embedding#0 to blocks.3, 1 item each"
        f" (devices 0-3, 2 devices each, by turns: {same})",
        f"stage 5: head:linear#0 to :cross_entropy_loss#0 (devices 2-3: {same})",
    )


def test_samples_are_followed_from_stage_to_stage() -> None:
    model = stack(2)
    (parallel,) = data_parallel(model, cluster(1, 2))
    items = stage_items(model)
    cuts, mesh = (items[:2], items[2:]), grid({"data": 2})
    stages = tuple(Stage(own, (range(2 * i, 2 * i + 2),), mesh) for i, own in enumerate(cuts))
    _, *lines = words(model, Decisions(stages, parallel.nodes, schedule="1f1b"))
    assert len(lines) == 2
    assert all("axis data over 2 devices splits samples in" in line for line in lines)
    assert not any("dim 0" in line for line in lines)


def test_stages_of_a_rewritten_program_are_cut_of_what_rewrites_made() -> None:
    model = stack(2)
    head = next(i for i in model.main.body if isinstance(i, Node) and i.path == "head")
    take = f"take {head.results[0].name} in main by linear_t: linear({', '.join(head.refs)})"
    items, mesh = stage_items(rewritten(model, [take])), grid({"x": 1})
    cuts = (items[:2], items[2:])
    stages = tuple(Stage(own, (range(i, i + 1),), mesh) for i, own in enumerate(cuts))
    *cut, said = words(model, Decisions(stages, schedule="1f1b", rewrites=(take,)))
    assert len(cut) == 3
    assert said == "head: computed by linear (linear_t)"


def test_a_peak_that_leaves_no_room_is_said() -> None:
    cluster = load_cluster("2xA100-40GB")
    there = cluster.device.memory_bytes
    assert tight_words(cluster, int(there * 0.96)) == ()
    (line,) = tight_words(cluster, int(there * 0.999))
    assert "(0.1%) of a device" in line
    assert f"--memory {int(there * 0.95) // 2**20}MiB" in line
    assert tight_words(load_cluster("2xcpu"), 2**40) == ()
