"""Small copies of plans for inference: what is kept of both programs, and that they are proved."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parloom import api
from parloom import runtime as rt
from parloom.capture import Loaded, fingerprint, load_abstract
from parloom.capture.inference import capture_inference
from parloom.execute import shrink as shrinking
from parloom.execute.inference import inference_programs
from parloom.execute.shrink import shrink
from parloom.ir.graph import CACHE
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import grid
from parloom.ir.plan import NO_OPTIMIZER, ONE_DEVICE, Decisions, Inference, ModelSource, Plan
from parloom.ir.text import print_graph
from parloom.search.answers import decided_beside
from tests.dist.inference_plans import CONFIGS, caches_cut, inputs_cut, two_stages

BATCH, PROMPT, TOKENS = 8, 32, 96
WIDER: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 4096},
    "gpt2": {"n_embd": 256, "n_head": 8, "vocab_size": 4001, "n_positions": 256},
    "t5": {"d_model": 128, "d_kv": 16, "num_heads": 8, "d_ff": 512, "vocab_size": 4096},
}
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}
CLASSES = {
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration",
}  # fmt: skip


def _built(folder: Path, name: str) -> tuple[ModelSource, Loaded]:
    """A model that is larger than its copy, from a config."""
    config: Any = CONFIGS[name]()
    for key, value in (WIDER[name] | {LAYERS[name]: 3}).items():
        setattr(config, key, value)
    config.architectures = [CLASSES[name]]
    config.save_pretrained(folder)
    source = ModelSource(str(folder / "config.json"), BATCH, PROMPT)
    return source, load_abstract(source.spec, batch=BATCH, seq=PROMPT, limit=0)


def _plan(folder: Path, name: str, way: str) -> tuple[Plan, Loaded]:
    source, loaded = _built(folder, name)
    decode, prefill = capture_inference(loaded, TOKENS)
    assert prefill is not None
    if way == "stages":
        chosen = two_stages(decode, Decisions(ONE_DEVICE), 4)
    else:
        dim = {"samples": 0, "heads": 1, "positions": 2}[way]
        chosen = caches_cut(decode, grid({"x": 4}), x=dim)
    prompts = decided_beside(prefill, chosen, lower_stages(decode, chosen))
    plan = Plan(
        source, f"{chosen.num_ranks}xcpu", fingerprint(loaded.model, loaded.batch), NO_OPTIMIZER,
        "by hand", chosen, print_graph(decode),
        inference=Inference(TOKENS, print_graph(prefill), prompts.nodes),
    )  # fmt: skip
    return plan, loaded


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "way"), [("llama", "positions"), ("gpt2", "stages"), ("t5", "heads")]
)
def test_both_programs_are_proved_small(name: str, way: str, tmp_path: Path) -> None:
    plan, _ = _plan(tmp_path, name, way)
    report = api.verify(plan, shrink=True)
    assert report.passed, report
    assert "not kept" not in report.shrunk, report.shrunk
    assert "new tokens 96 -> " in report.shrunk
    assert report.eager is not None
    assert report.eager.calls == 4  # the copy is compared with its own module


def test_caches_lie_as_they_do_in_the_plan(tmp_path: Path) -> None:
    """By positions, whose number divides in the copy, too, by the ranks that are left."""
    plan, loaded = _plan(tmp_path, "llama", "positions")
    copy = shrink(plan, loaded)
    assert copy.plan.inference is not None
    first = inference_programs(copy.plan)["decode"].only.pcg
    homes = [first.homes[e.target] for e in first.graph.of_kind(CACHE)]
    assert {(shard.axis, shard.dim) for home in homes for shard in home.shards} == {("x", 2)}
    small, large = (
        sum(p.numel() for p in model.parameters()) for model in (copy.loaded.model, loaded.model)
    )
    assert small < large / 4
    assert len(homes) == 4  # keys and values of two layers, of three


@pytest.mark.slow
def test_a_wrong_program_fails_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = _plan(tmp_path, "llama", "heads")
    right = rt.write_cache

    def late(cache: Tensor, dim: int, position: Tensor | None, *rest: object) -> Tensor:
        return right(cache, dim, None if position is None else position - 1, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rt, "write_cache", late)
    report = api.verify(plan, shrink=True)
    assert not report.passed
    assert "logits of token 2" in str(report.first_difference)


@pytest.mark.slow
def test_what_prompts_lose_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose prompts do not divide says so: decisions are dropped by name."""
    plan, loaded = _plan(tmp_path, "llama", "heads")
    right = shrinking._misfit

    def misfit(big: shrinking.Big, node: Any, *rest: Any) -> str | None:
        prompts = big.plan.inference is None
        return "it does not fit" if prompts and "q_proj" in node.key else right(big, node, *rest)

    monkeypatch.setattr(shrinking, "_misfit", misfit)
    assert "not kept: prompts: model.layers.0.self_attn.q_proj" in shrink(plan, loaded).text


@pytest.mark.slow
def test_one_pass_is_proved_small() -> None:
    """A denoiser, by samples."""
    loaded = load_abstract("zoo:dit_xl_denoiser", batch=BATCH, limit=0)
    graph, _ = capture_inference(loaded, 0)
    chosen = inputs_cut(graph, grid({"x": 4}), dict.fromkeys(loaded.batch, 0))
    plan = Plan(
        ModelSource("zoo:dit_xl_denoiser", BATCH), "4xcpu",
        fingerprint(loaded.model, loaded.batch), NO_OPTIMIZER, "by hand", chosen,
        print_graph(graph), inference=Inference(),
    )  # fmt: skip
    report = api.verify(plan, shrink=True)
    assert report.passed, report
    assert "not kept" not in report.shrunk, report.shrunk
