"""Every model on one, two and four ranks, by samples, heads, positions and in stages, is the
same.
"""

from collections.abc import Mapping

import pytest

from parloom.capture import parameters_of
from parloom.errors import VerifyError
from parloom.execute.eager import PLAN
from parloom.execute.eager_compare import DIFFERS, EQUAL
from parloom.execute.eager_inference import compare_inference, drawn
from parloom.execute.inference import inference_programs, verify_inference
from parloom.ir.factors import factorize
from parloom.ir.graph import CACHE, Graph
from parloom.ir.mesh import grid
from parloom.ir.plan import ONE_DEVICE, Decisions, NodeDecision, Plan, one_stage
from parloom.ir.text import parse_graph, print_graph
from tests.dist.inference_plans import (
    CONFIGS,
    PASSES,
    caches_cut,
    columns_cut,
    four_stages,
    inputs_cut,
    passed,
    plan_of_pass,
    served,
    two_stages,
)

WAYS = ("batch", "tensor", "sequence", "stages")
MESHES = {2: grid({"x": 2}), 4: grid({"x": 2, "y": 2})}
DIMS = {"batch": 0, "tensor": 1, "sequence": 2}  # of caches
# Of what is denoised: rows of an image, rows of all frames of a video.
ROWS = {"dit": {"noisy": 2}, "wan": {"noisy": 3}}
CELLS = [(1, "whole"), *((ranks, way) for ranks in MESHES for way in WAYS)]


def _cell(name: str, ranks: int, way: str) -> object:
    return pytest.param(name, ranks, way, id=f"{name}-{ranks}-{way}")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "ranks", "way"), [_cell(n, *c) for n in CONFIGS for c in CELLS])
def test_tokens_and_caches(name: str, ranks: int, way: str) -> None:
    """Logits of a prompt and of three tokens after it, and what the caches are left with."""
    found = served(name)
    graph = found.made.decode
    plan = found.plan(_decided(graph, ranks, way, DIMS))
    _check_split(plan, ranks, way)
    report = verify_inference(plan, found.tensors, found.loaded.batch)
    assert report.passed, report
    assert report.num_ranks == ranks, report


def _decided(graph: Graph, ranks: int, way: str, dims: Mapping[str, int]) -> Decisions:
    if way == "whole":
        return Decisions(ONE_DEVICE)
    if way == "stages":
        return two_stages(graph, Decisions(ONE_DEVICE), 2) if ranks == 2 else four_stages(graph, 2)
    mesh = MESHES[ranks]
    return caches_cut(graph, mesh, **{axis.name: dims[way] for axis in mesh.axes})


def _check_split(plan: Plan, ranks: int, way: str) -> None:
    """The caches lie as they are meant to."""
    first = inference_programs(plan)["decode"]
    if way in DIMS:
        pcg = first.only.pcg
        homes = [pcg.homes[e.target] for e in pcg.graph.of_kind(CACHE)]
        for home in homes:
            assert {s.dim for s in home.shards} == {DIMS[way]}
            assert len(home.shards) == ranks // 2
    else:
        assert len(first.stages) == ranks


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("name", "ranks", "way"),
    [_cell(n, *c) for n in PASSES for c in CELLS if (n, c[1]) != ("vit", "sequence")],
)
def test_one_pass(name: str, ranks: int, way: str) -> None:
    """The step of a denoiser, and the logits of an image."""
    loaded, graph = passed(name)
    if way in ("whole", "stages"):
        chosen = _decided(graph, ranks, way, {})
    elif way == "tensor":
        chosen = columns_cut(graph, MESHES[ranks])
    else:
        batch = dict.fromkeys(loaded.batch, 0)
        chosen = inputs_cut(graph, MESHES[ranks], batch if way == "batch" else ROWS[name])
    attention = [n.factors for n in chosen.nodes if "scaled_dot_product_attention" in n.key]
    assert way in ("whole", "stages") or attention, "attention is split"
    tensors = {n: t.detach() for n, t in parameters_of(loaded.model, graph).items()}
    report = verify_inference(plan_of_pass(graph, chosen), tensors, loaded.batch)
    assert report.passed, report
    assert report.num_ranks == ranks, report


@pytest.mark.parametrize("name", PASSES)
def test_one_pass_is_that_of_the_module(name: str) -> None:
    """Outputs are not zero, as those of a denoiser whose head starts at zero would be."""
    loaded, graph = passed(name)
    report = compare_inference(lambda: loaded, graph, None, 0, PLAN)
    assert report.outcome == EQUAL, report
    assert report.worst < 1e-12, report
    changed = print_graph(graph).replace("= gelu(", "= silu(").replace(', approximate="tanh"', "")
    other = compare_inference(lambda: loaded, parse_graph(changed), None, 0, PLAN)
    assert other.outcome == DIFFERS


def test_gates_that_start_at_zero_hide_nothing() -> None:
    """The zoo's denoiser is the identity behind a head of zeros until its weights are drawn."""
    loaded = PASSES["dit"]()
    outputs = loaded.model(**loaded.batch)
    assert not outputs.any()
    assert drawn(loaded.model)(**loaded.batch).all()


def test_positions_beside_a_class_token_are_not_cut() -> None:
    """Four patches and one more: no axis divides them, and the refusal says so."""
    _, graph = passed("vit")
    flat = next(n for n in graph.flat() if n.node.op == "scaled_dot_product_attention")
    rule = factorize(graph).rule(flat.function, flat.node)
    positions = next(factor for factor, size in rule.sizes if size == 5)
    nodes = (NodeDecision(flat.key, ((positions, ("x",)),)),)
    with pytest.raises(VerifyError, match="size 5 does not divide by x = 2"):
        inference_programs(plan_of_pass(graph, Decisions(one_stage(MESHES[2]), nodes)))
