"""Pins as text: what is understood, what is refused, and what they name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from parloom.candidates import candidates
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout, Shard
from parloom.ir.mesh import grid
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision, one_stage
from parloom.search.conflicts import broken, check_pins
from parloom.search.pinned import Pinned, clashes, resolve
from parloom.search.pins import Kind, parse_pin
from parloom.search.request import Request
from tests.property.searched import ADAM
from tests.unit.graphs import cluster, fused, perceptron, stack

MESH = grid({"x": 2, "y": 4})


def pinned_by(graph: Graph, *texts: str, forbidden: bool = False) -> Pinned:
    pins = [parse_pin(text, forbidden=forbidden) for text in texts]
    return resolve(pins, graph, factorize(graph))


def places(graph: Graph, text: str) -> set[str]:
    """The operators that a pin is about."""
    return {name for _, name in pinned_by(graph, text).subjects[0].operators}


def test_every_example_of_the_page_is_understood() -> None:
    page = Path("docs/reference/pins.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    examples = [text for cell in cells for text in re.findall(r"`([^`]+=[^`]+)`", cell)]
    assert len(examples) >= 14
    kinds = {parse_pin(text).kind for text in examples if text != "NAME=LAYOUT"}
    assert kinds == set(Kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lm_head", "--pin lm_head: write --pin NAME=LAYOUT; LAYOUT is one of FACTOR:AXIS, dim0"),
        ("=n:x", "write --pin NAME=LAYOUT"),
        ("head=", "write --pin NAME=LAYOUT"),
        ("head=n:x y", "'n:x y' is no layout"),
        ("head=:x", "':x' is no layout"),
        ("head=n:1", "split over 1: write n:replicated for what is whole"),
        ("head=replicated:x", "replicated stands alone"),
        ("head=keep,n:x", "keep stands alone"),
        ("head=n:x,weights:sharded", "layout and storage in one; give each a --pin of its own"),
        ("mesh=2,4", "'2' is no mesh; write sizes, outermost first, as mesh=2x4"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_pin(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linear_along_zzz", "no rule 'linear_along_zzz'; did you mean 'linear_along_"),
        ("linear_along_k", "no rule 'linear_along_k'; did you mean 'linear_along_"),
        ("add_304601_nonsense", "did you mean 'add_304601'?"),
        ("gelu_cat_9f78e4_rellu", "did you mean 'gelu_cat_9f78e4_relu'"),
        ("merge_liner", "did you mean 'merge_linear'"),
        ("*_along_zzz", "no rule has a name like '*_along_zzz'"),
        ("*_layer_norm", "no rule has a name like '*_layer_norm'"),
        ("*_0p0p5", "no rule has a name like"),
    ],
)
def test_rewrites_that_cannot_be_are_refused(name: str, message: str) -> None:
    for forbidden in (False, True):
        with pytest.raises(InputError) as caught:
            parse_pin(f"rewrite={name}", forbidden=forbidden)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "pad", "merge_linear", "linear_along_n", "linear_along_d1", "*_along_d1", "*_relu", "*",
        "relu_along_d0", "*_along_n", "fold_*", "*_0p125", "*_0p*", "view_along_f[01]",
        "gelu_cat_9f78e4_relu", "p?d",
    ],
)  # fmt: skip
def test_all_rewrites_that_can_be_may_be_named(name: str) -> None:
    assert parse_pin(f"rewrite={name}", forbidden=True).kind is Kind.REWRITE


@pytest.mark.parametrize(
    ("name", "meant", "other"),
    [
        ("mul_linear_8c707d", "mul_linear_8c707d", "mul_linear_069230"),
        ("mul_linear_8c707d", "mul_linear_8c707d_0p5", "mul_linear_069230_0p5"),
        ("mul_linear_*d", "mul_linear_8c707d_m1e-05", "mul_linear_069230_0p5"),
        ("gelu_cat_9f78e4", "gelu_cat_9f78e4_hard_tanh", "gelu_cat_9f78e"),
        ("gelu_cat_9f78e4_relu", "gelu_cat_9f78e4_relu", "gelu_cat_9f78e4_tanh"),
        ("mul_linear_8c707d_0p5", "mul_linear_8c707d_0p5", "mul_linear_8c707d"),
    ],
)
def test_a_rule_stands_for_its_cases_and_a_case_for_itself(
    name: str, meant: str, other: str
) -> None:
    for forbidden in (False, True):
        found = pinned_by(perceptron(), f"rewrite={name}", forbidden=forbidden)
        asks = [found.wants_rewrite, found.allows_rewrite][forbidden]
        assert asks((meant,)) != forbidden
        assert asks((other, "merge_linear")) == forbidden
        assert asks((other, meant)) != forbidden


def test_a_layout_may_be_copied_from_a_printed_plan() -> None:
    assert parse_pin("up={d0: x, n: y}").terms == parse_pin("up=d0:x,n:y").terms


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("up", {"up:linear#0"}),
        ("up:linear", {"up:linear#0"}),
        ("up:linear#0", {"up:linear#0"}),
        ("*:linear#0", {"up:linear#0", "down:linear#0"}),
        ("*", {"up:linear#0", "down:linear#0"}),
    ],
)
def test_names_of_operators(name: str, found: set[str]) -> None:
    """Of all that is named, what has the factor is meant."""
    assert places(perceptron(), f"{name}=n:x") == found


def test_a_module_stands_for_all_that_is_in_it() -> None:
    graph = stack(3)
    assert places(graph, "blocks.1=replicated") == {
        "blocks.1.norm:mul#0", "blocks.1.up:linear#0", "blocks.1:relu#0",
        "blocks.1.down:linear#0", "blocks.1:add#0",
    }  # fmt: skip
    assert places(graph, "blocks.1.up=n") == {"blocks.1.up:linear#0"}
    assert pinned_by(graph, "blocks.1.up=n").subjects[0].others == 2
    assert pinned_by(graph, "blocks=n").subjects[0].others == 0
    stored = pinned_by(graph, "blocks.1=optimizer:sharded").subjects[0].parameters
    assert stored == ("blocks.1.norm.weight", "blocks.1.up.weight", "blocks.1.down.weight")
    assert pinned_by(graph, "blocks=recompute").policies == dict.fromkeys(
        ("blocks.0", "blocks.1", "blocks.2"), "recompute"
    )


def test_a_factor_that_views_have_cut_is_any_of_its_parts() -> None:
    graph = fused()
    pin = parse_pin("qkv=n:x")
    rule = factorize(graph).rules["main", "qkv:linear#0"]
    assert {f for f, _ in rule.sizes} >= {"n0", "n1", "n2"}
    assert pin.allows_operator(rule, {"n1": ("x",)}, MESH)
    assert not pin.allows_operator(rule, {"k": ("x",)}, MESH)


@pytest.mark.parametrize(
    ("layout", "assignment", "holds"),
    [
        ("n:x", {"n": ("x",)}, True),
        ("n:x", {"n": ("y",)}, False),
        ("n:8", {"n": ("x", "y")}, True),
        ("n:8", {"n": ("y",)}, False),
        ("n:4", {"n": ("y",)}, True),
        ("n", {"n": ("y",)}, True),
        ("n", {"k": ("y",)}, False),
        ("n:replicated", {"k": ("y",)}, True),
        ("replicated", {}, True),
        ("replicated", {"k": ("y",)}, False),
        ("sharded", {"k": ("y",)}, True),
        ("dim0:x", {"d0": ("x",)}, True),
        ("dim1:x", {"d0": ("x",)}, False),
        ("dim1:x", {"n": ("y", "x")}, True),
        ("d0:x,n:y", {"d0": ("x",), "n": ("y",)}, True),
        ("d0:x,n:y", {"d0": ("x",)}, False),
    ],
)
def test_what_holds(layout: str, assignment: dict[str, tuple[str, ...]], holds: bool) -> None:
    rule = factorize(perceptron()).rules["main", "up:linear#0"]
    assert parse_pin(f"up={layout}").allows_operator(rule, assignment, MESH) == holds
    forbidden = parse_pin(f"up={layout}", forbidden=True)
    assert forbidden.allows_operator(rule, assignment, MESH) != holds


@pytest.mark.parametrize(
    ("layout", "compute", "chunks", "holds"),
    [
        ("weights:sharded", "", ("x",), True),
        ("weights:sharded", "y", (), True),
        ("weights:sharded", "", (), False),
        ("weights:replicated", "", (), True),
        ("weights:replicated", "y", (), False),
        ("weights:x", "y", ("x",), True),
        ("weights:8", "y", ("x",), True),
        ("weights:8", "y", (), False),
        ("dim0:y", "y", (), True),
        ("dim0:x", "y", ("x",), False),
        ("replicated", "", (), True),
    ],
)
def test_what_storage_holds(
    layout: str, compute: str, chunks: tuple[str, ...], holds: bool
) -> None:
    home = Layout((Shard(compute, 0, 1),)) if compute else Layout()
    found = parse_pin(f"up.weight={layout}").allows_stored(home, {"weights": chunks}, MESH)
    assert found == holds


def test_meshes() -> None:
    for text, holds in (("2x4", True), ("4x2", False), ("8", False), ("x:2", True), ("y:2", False)):
        assert parse_pin(f"mesh={text}").allows_mesh(MESH) == holds
        assert parse_pin(f"mesh={text}", forbidden=True).allows_mesh(MESH) != holds
    assert parse_pin("mesh=x:2,y:4").allows_mesh(MESH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks.1.upp=n:x", "nothing is called 'blocks.1.upp'; did you mean 'blocks.1.up'"),
        ("hed.weight=weights:sharded", "no parameter 'hed.weight'; did you mean 'head.weight'"),
        ("zzz=recompute", "no block 'zzz'; there are blocks.0, blocks.1, blocks.2"),
        ("blocks.1.up=recompute", "blocks are recomputed as a whole; write blocks.1=recompute"),
        ("head=q:x", "no factor or dim q: head:linear#0 has d0 (16), d1 (8), k (32), n (64)"),
        ("head=dim7", "no factor or dim dim7: head:linear#0 has"),
        ("head.weight=n:x", "head.weight is a parameter: write dim0:x, replicated or sharded"),
    ],
)
def test_names_that_there_are_not(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        pinned_by(stack(3), text)
    assert message in str(caught.value)
    assert f"--pin {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("up=n:data", "no axis 'data'; known: x, y; or a number of devices"),
        ("up=n:5", "no axes make 5 devices; there are: 2, 4, 8"),
        ("down=n:8", "down:linear#0 cannot: n is 4, it is to be over 8 devices"),
        ("up=k:4", "up:linear#0 cannot: k is 6, it is to be over 4 devices"),
        ("mesh=3x3", "no such mesh; of one and two axes there are: x:8; x:4,y:2; x:2,y:4"),
        ("up=n:z", "no axis 'z'; known: x, y; or a number of devices"),
    ],
)
def test_what_does_not_divide(text: str, message: str) -> None:
    graph = perceptron()
    with pytest.raises(InputError) as caught:
        check_pins(pinned_by(graph, text), factorize(graph), cluster(4, 2))
    assert message in str(caught.value)


def test_a_block_cannot_be_kept_and_recomputed() -> None:
    graph = stack(3)
    assert clashes(pinned_by(graph, "blocks.1=keep", "blocks=recompute"))
    assert not clashes(pinned_by(graph, "blocks.1=keep", "blocks.2=recompute"))


def test_plans_are_checked_against_pins() -> None:
    graph = stack(2)
    nodes = tuple(NodeDecision(f"blocks.{i}.up:linear#0", (("n", ("x",)),)) for i in range(2))
    plan = Decisions(
        one_stage(MESH), nodes, activations=(ActivationDecision("blocks.1", "recompute"),)
    )
    held = ("blocks.*.up=n:x", "blocks.1=recompute", "blocks.0.up.weight=sharded", "mesh=2x4")
    assert broken(pinned_by(graph, *held), graph, plan) is None
    for text in held:
        assert broken(pinned_by(graph, text, forbidden=True), graph, plan) is not None
    assert broken(pinned_by(graph, "head=sharded"), graph, plan) == (
        "--pin head=sharded: head:linear#0 is replicated"
    )


def test_other_methods_drop_what_does_not_hold() -> None:
    graph = perceptron()
    machine = load_cluster("2x2xH100")
    asked = Request(graph, DataSheets(machine), ADAM, 10**12, pinned=pinned_by(graph, "up=n"))
    found = candidates(replace(asked, method="megatron"), lambda text: None).found
    assert found
    assert all("tensor" in candidate.name for candidate in found)
    with pytest.raises(InputError, match="data_parallel has no plan as asked: --pin up=n: up:lin"):
        candidates(replace(asked, method="data_parallel"), lambda text: None)


def test_a_budget_that_ends_before_any_plan_is_named_and_no_rule_of_thumb() -> None:
    pinned = pinned_by(perceptron(), "up=k")
    asked = Request(perceptron(), DataSheets(load_cluster("2x2xH100")), ADAM, 10**12, pinned=pinned)
    with pytest.raises(InputError, match="auto finds no plan within its budget"):
        candidates(replace(asked, budget=1), lambda text: None)
