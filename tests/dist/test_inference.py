"""Prompts and the tokens after them: captured, laid out in every way, generated, and proved."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.capture.generation import capture_generation
from parloom.comparators.baselines import megatron
from parloom.cost.clusters import resolve_cluster
from parloom.errors import CaptureError, InputError, LayoutError, VerifyError
from parloom.execute.eager import PLAN
from parloom.execute.eager_compare import DIFFERS, EQUAL
from parloom.execute.eager_inference import compare_inference
from parloom.execute.inference import inference_programs, verify_inference
from parloom.ir.graph import CACHE, Node, Ref, TensorSpec, Value
from parloom.ir.layout import describe
from parloom.ir.mesh import grid
from parloom.ir.plan import ONE_DEVICE, Decisions
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.stages import _Stages
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import verify_graph
from parloom.zoo.mlp import build as build_mlp
from tests.dist.inference_plans import (
    CONFIGS,
    ENCODE,
    TOKENS,
    caches_cut,
    passed,
    served,
    two_stages,
)

# Experts of the library have no products in double precision.
DTYPES = {"mixtral": (torch.float32, 1e-5)}


@pytest.mark.parametrize("name", CONFIGS)
def test_programs_do_what_the_module_does(name: str) -> None:
    """Logits and caches of a loop with the library's own cache."""
    dtype, limit = DTYPES.get(name, (torch.float64, 1e-12))
    found = served(name, dtype=dtype)
    made = found.made
    for graph in (made.prefill, made.decode):
        assert parse_graph(print_graph(verify_graph(graph))) == graph
        assert not any(entry.trainable for entry in graph.inputs)
        assert len(graph.of_kind(CACHE)) == len(made.prefill.updates)
    assert len(made.decode.updates) == 4  # what an encoder made is read alone
    assert len(made.prefill.updates) == (8 if name in ENCODE else 4)
    report = compare_inference(lambda: found.loaded, made.decode, made.prefill, TOKENS, PLAN)
    assert report.outcome == EQUAL, report
    assert report.worst < limit, report
    assert report.calls == 4


def test_another_program_is_told_from_the_module() -> None:
    """Prompts whose tokens see later ones, and caches that are written one position late."""
    found = served("llama")
    made, loaded = found.made, (lambda: found.loaded)
    seeing = parse_graph(print_graph(made.prefill).replace("None, 0.0, True", "None, 0.0, False"))
    assert compare_inference(loaded, made.decode, seeing, TOKENS, PLAN).outcome == DIFFERS
    late = print_graph(made.decode).replace("arange(1, dtype", "arange(1, 2, dtype")
    report = compare_inference(loaded, parse_graph(late), made.prefill, TOKENS, PLAN)
    assert report.outcome == DIFFERS


LAYOUTS = {"batch and heads": {"x": 0, "y": 1}, "heads and sequence": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("name", "way"), [*(("llama", way) for way in LAYOUTS), ("gpt2", "heads and sequence")]
)
def test_caches_lie_in_any_way(name: str, way: str) -> None:
    cut = LAYOUTS[way]
    found, mesh = served(name), grid({"x": 2, "y": 2})
    chosen = caches_cut(found.made.decode, mesh, **cut)
    plan = found.plan(chosen)
    pcg = inference_programs(plan)["decode"].only.pcg
    for entry in (e for e in pcg.graph.of_kind(CACHE) if e.target.startswith(CACHE)):
        layout = pcg.homes[entry.target]
        assert {(s.axis, s.dim) for s in layout.shards} == set(cut.items()), describe(
            layout, entry.value.spec.shape, mesh
        )
    assert plan_from_json(plan_to_json(plan), "plan") == plan
    report = verify_inference(plan, found.tensors, found.loaded.batch)
    assert report.passed, report
    assert report.num_ranks == mesh.num_ranks
    caches = pcg.graph.of_kind(CACHE)
    assert report.num_tensors == 1 + 4 + len(caches)  # tokens, logits of each


def test_a_rule_of_thumb_serves() -> None:
    found = served("gpt2")
    chosen = next(iter(megatron(found.made.decode, resolve_cluster("4xcpu").cluster)))
    assert verify_inference(found.plan(chosen), found.tensors, found.loaded.batch).passed


@pytest.mark.parametrize(
    ("name", "sizes", "cut", "microbatches"),
    [
        ("gpt2", {"x": 2}, {"x": 2}, 2),
        ("llama", {"x": 2}, {"x": 0}, 2),
    ],
)
def test_stages_have_caches_of_their_own(
    name: str, sizes: dict[str, int], cut: dict[str, int], microbatches: int
) -> None:
    """Each microbatch of prompts finds its own, however a stage cuts them further."""
    found = served(name)
    graph = found.made.decode
    chosen = two_stages(graph, caches_cut(graph, grid(sizes), **cut), microbatches)
    plan = found.plan(chosen)
    programs = inference_programs(plan)
    each = len(graph.of_kind(CACHE)) // 2
    assert [len(stage.program.caches) for stage in programs["prefill"].stages] == [each, each]
    report = verify_inference(plan, found.tensors, found.loaded.batch)
    assert report.passed, report
    assert report.num_ranks == 2 * max(1, len(sizes) * 2)


def test_weights_that_prompts_alone_read_lie_with_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys of what an encoder made: tokens read them from caches. Elsewhere they are refused."""
    found = served("bart")
    chosen = two_stages(found.made.decode, Decisions(ONE_DEVICE), 2)
    stages = inference_programs(found.plan(chosen))["decode"].stages
    for index, stage in enumerate(stages):
        own = [p.name for p in stage.program.parameters if "encoder_attn.k_proj" in p.name]
        assert own
        assert all(f"decoder.layers.{index}." in name for name in own)
    monkeypatch.setattr(_Stages, "of_module", lambda *_: 0)
    with pytest.raises(LayoutError, match=r"reads model\.decoder\.layers\.1\..*, which lies else"):
        inference_programs(found.plan(chosen))


def test_labels_are_no_part_of_one_pass() -> None:
    """Without tokens there is one program, of the outputs."""
    _, graph = passed("vit")
    assert [e.target for e in graph.of_kind("batch")] == ["pixel_values"]
    assert graph.loss is None


def test_a_cache_that_is_written_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof sees one wrong row on the ranks."""
    found = served("llama")
    plan = found.plan(caches_cut(found.made.decode, grid({"x": 2}), x=2))
    right = rt.write_cache

    def late(cache: Tensor, dim: int, position: Tensor | None, *rest: object) -> Tensor:
        return right(cache, dim, None if position is None else position - 1, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rt, "write_cache", late)
    report = verify_inference(plan, found.tensors, found.loaded.batch)
    assert not report.passed
    assert "logits of token 2" in str(report.first_difference)


def test_programs_that_disagree_about_caches_are_refused() -> None:
    """Prompts may not write keys where no token reads them."""
    found = served("llama")
    plan = found.plan(caches_cut(found.made.decode, grid({"x": 2}), x=1))
    assert plan.inference is not None
    nodes = tuple(
        replace(node, factors=(("d0", ("x",)),)) if "write_cache" in node.key else node
        for node in plan.inference.prefill_nodes
    )
    wrong = replace(plan, inference=replace(plan.inference, prefill_nodes=nodes))
    with pytest.raises(LayoutError, match="a cache is written where it lies"):
        inference_programs(wrong)


def test_graphs_that_read_caches_otherwise_are_refused() -> None:
    graph = served("llama").made.decode
    text = print_graph(graph)
    twice = text.replace('update "cache_0_key" = model_layers_0_out\n', "")
    read = parse_graph(twice)
    with pytest.raises(VerifyError, match="cache 'cache_0_key' is not left as it is written"):
        verify_graph(read)
    cache = graph.of_kind(CACHE)[0]
    first = graph.main.body[0]
    assert isinstance(first, Node)
    spec = TensorSpec(cache.value.spec.shape, cache.value.spec.dtype)
    reader = replace(
        first, op="neg", args=(Ref(cache.value.name),), kwargs=(), results=(Value("again", spec),)
    )
    main = replace(graph.main, body=(reader, *graph.main.body))
    with pytest.raises(VerifyError, match=r"is not read by one parloom.write_cache alone"):
        verify_graph(replace(graph, main=main))


def test_what_generates_nothing_is_refused() -> None:
    model, batch = build_mlp(batch=4, features=8, hidden=8, depth=1, classes=4)
    with pytest.raises(InputError, match="generates from 'input_ids' alone"):
        capture_generation(model, batch, 4)
    found = served("llama")
    table = found.model.get_submodule("model.embed_tokens")
    with pytest.raises((CaptureError, InputError)):
        capture_generation(table, {"input_ids": found.prompts}, 4)


def test_the_server_refuses_another_batch() -> None:
    found = served("gpt2")
    programs = inference_programs(found.plan(Decisions(ONE_DEVICE)))
    pipelines = {name: program.pipeline for name, program in programs.items()}
    server = rt.Server(
        pipelines, found.tensors, rt.SingleComm(programs["decode"].only.program.mesh)
    )
    with pytest.raises(InputError, match=r"'input_ids' of the prefill program is \[4, 8\]"):
        server.generate(torch.zeros(4, 5, dtype=torch.int64), 2)
    made, logits = server.generate(found.prompts, 3)
    assert made.shape == (4, 3)
    assert len(logits) == 3
