"""Weights in int8 and fp8: the module with rounded weights, however they lie, in fewer bytes."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom import api, arguments
from parloom.capture.inference import capture_inference
from parloom.capture.load import Loaded
from parloom.capture.quantized import (
    SCALE,
    WEIGHTS,
    quantize,
    scale_of,
    state_of,
    stored_values,
    without_scales,
)
from parloom.errors import InputError
from parloom.execute import eager_inference
from parloom.execute import inference as proof
from parloom.execute.eager import PLAN
from parloom.execute.eager_compare import DIFFERS, EQUAL, tolerance_of
from parloom.execute.inference import verify_inference
from parloom.ir.graph import Graph, Input, TensorSpec, Value
from parloom.ir.mesh import grid
from parloom.ir.plan import ONE_DEVICE, Decisions
from parloom.ir.plan_json import plan_from_json, plan_to_json
from tests.dist.inference_plans import (
    TOKENS,
    caches_cut,
    columns_cut,
    passed,
    plan_of_pass,
    served,
    two_stages,
)

NARROW = {"int8": "int8", "fp8": "float8_e4m3fn"}


def _stored(graph: Graph) -> dict[str, str]:
    return {e.target: e.value.spec.dtype for e in graph.of_kind("parameter")}


@pytest.mark.parametrize(("name", "weights"), [("llama", "int8"), ("gpt2", "fp8")])
def test_programs_are_the_module_with_rounded_weights(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served(name, weights)
    made, dtype = found.made, NARROW[weights]
    dtypes = [_stored(graph) for graph in (made.prefill, made.decode)]
    assert dtypes[0] == dtypes[1]
    products = {"llama": 2 * 7 + 1, "gpt2": 2 * 4}[name]  # GPT-2's head is its embedding
    assert list(dtypes[0].values()).count(dtype) == products
    assert sum(target.endswith(SCALE) for target in dtypes[0]) == products
    assert tolerance_of(made.decode)[0] in ("float32", "float64")
    loaded = lambda: found.loaded  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(eager_inference, "round_weights", lambda *_: None)
        whole = eager_inference.compare_inference(loaded, made.decode, made.prefill, TOKENS, PLAN)
        assert whole.outcome == DIFFERS
    report = eager_inference.compare_inference(loaded, made.decode, made.prefill, TOKENS, PLAN)
    assert report.outcome == EQUAL, report
    assert report.worst < 1e-12, report


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "weights", "way"),
    [
        ("llama", "int8", "heads"), ("gpt2", "fp8", "positions"), ("gpt2", "int8", "stages"),
        ("t5", "int8", "heads"),
    ],
)  # fmt: skip
def test_they_lie_as_other_weights_do(name: str, weights: str, way: str) -> None:
    found = served(name, weights)
    graph = found.made.decode
    if way == "stages":
        chosen = two_stages(graph, Decisions(ONE_DEVICE), 2)
    else:
        chosen = caches_cut(graph, grid({"x": 2}), x=1 if way == "heads" else 2)
    report = verify_inference(found.plan(chosen), found.tensors, found.loaded.batch)
    assert report.passed, report
    assert report.num_ranks == 2, report


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_product_in_parts_is_scaled_once(weights: str) -> None:
    """Of columns and of rows, with a bias behind the sum."""
    loaded, graph = passed("dit", weights)
    chosen = columns_cut(graph, grid({"x": 2, "y": 2}))
    tensors = state_of(loaded.model, graph)
    plan = plan_of_pass(graph, chosen)
    assert verify_inference(plan, tensors, loaded.batch).passed


def test_other_scales_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = served("llama", "int8")
    plan = found.plan(caches_cut(found.made.decode, grid({"x": 2}), x=1))
    right = proof.generated

    def off(prefill: Graph, decode: Graph, state: Mapping[str, Tensor], *rest: Any) -> Any:
        name = f"model.layers.1.mlp.down_proj.weight{SCALE}"
        return right(prefill, decode, {**state, name: state[name] * 1.001}, *rest)

    monkeypatch.setattr(proof, "generated", off)
    assert not verify_inference(plan, found.tensors, found.loaded.batch).passed


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dim", [0, 1])
def test_rounding_is_within_half_a_unit(weights: str, dim: int) -> None:
    """A channel of zeros stays one; the largest value of a channel is kept."""
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    weight.select(dim, 2).zero_()
    entry = Input(Value("w", TensorSpec((6, 6), NARROW[weights])), "parameter", "w")
    scale = scale_of(weight, dim, entry)
    spread = scale[:, None] if dim == 0 else scale
    error = (quantize(weight, dim, entry).double() * spread - weight).abs()
    limit = spread / 2 if weights == "int8" else (weight.abs() / 16).clamp(min=1e-3)
    assert (error <= limit * (1 + 1e-9)).all()
    assert not error.select(dim, 2).any()
    assert error.gather(1 - dim, weight.abs().argmax(1 - dim, keepdim=True)).max() < 1e-6


@pytest.mark.parametrize("weights", WEIGHTS)
def test_channels_whose_scale_is_no_number_of_the_dtype_are_zero(weights: str) -> None:
    """Float16 has nothing between 0 and 6e-8."""
    weight = torch.ones(2, 3, dtype=torch.float16)
    weight[1] = torch.tensor([3e-6, 0.0, -3e-6])
    entry = Input(Value("w", TensorSpec((2, 3), NARROW[weights])), "parameter", "w")
    scale, narrow = scale_of(weight, 0, entry), quantize(weight, 0, entry)
    stored = narrow.double() * scale.double()[:, None]
    assert stored.isfinite().all()
    assert (stored - weight.double()).abs().max() < 1e-2


class Narrow(nn.Module):
    """A model with a weight of its own in int8, and its scales."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        whole = torch.randint(-127, 128, (6, 4), dtype=torch.int8, generator=generator)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.rand(6, generator=generator), requires_grad=False)
        self.scaled = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.weight.to(x.dtype)) * self.weight_scale
        return torch.addmm(self.bias, hidden, self.scaled, beta=0.5, alpha=2.0)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_may_have_narrow_weights_of_its_own(weights: str | None) -> None:
    """They are no part of what is stored narrow, and products that scale what they add are left."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.head = Narrow(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.narrow(x))
            return made

    torch.manual_seed(0)
    model, x = Both(), torch.randn(8, 4)
    graph, _ = capture_inference(Loaded(model, {"x": x}), 0, weights)
    kept = {e.target: e.value.spec.dtype for e in graph.of_kind("parameter")}
    assert kept["narrow.weight"] == "int8"
    assert (f"head.weight{SCALE}" in kept) is (weights is not None)
    assert f"narrow.scaled{SCALE}" not in kept
    state = state_of(model, graph)
    assert torch.equal(state["narrow.weight"], model.narrow.weight)
    found = eager_inference.compare_inference(lambda: Loaded(model, {"x": x}), graph, None, 0, PLAN)
    assert found.outcome == EQUAL


def _silent(text: str) -> None:
    """Drop progress messages."""


def test_plans_hold_fewer_bytes() -> None:
    plans = {}
    for weights in (None, *WEIGHTS):
        captured = api.capture_inference("zoo:mlp", batch=8, weights=weights, progress=_silent)
        assert any("equals the module itself" in line for line in captured.assumptions)
        plans[weights] = api.search_inference(
            captured, cluster="2xcpu", method="data_parallel", progress=_silent
        )
    held = {w: dict(p.prediction.memory)["weights"] for w, p in plans.items() if p.prediction}
    graph = captured.graph
    wide = sum(e.value.spec.num_elements * 4 for e in without_scales(graph).of_kind("parameter"))
    narrow = sum(e.value.spec.num_bytes for e in graph.of_kind("parameter"))
    assert held[None] == wide
    assert held["int8"] == held["fp8"] == narrow < 0.3 * wide
    plan = plans["int8"]
    assert "--weights int8" in plan.command()
    assert "--weights" not in plans[None].command()
    assert plan_from_json(plan_to_json(plan), "plan") == plan
    report = api.verify(plan)
    assert report.passed
    assert "single device with weights rounded to int8" in str(report)


def test_values_are_made_of_those_that_are_read() -> None:
    """A rank reads the model's own names."""
    loaded, graph = passed("dit", "int8")
    own = dict(loaded.model.named_parameters())
    read = stored_values([graph], lambda name: own[name].detach())
    expected = state_of(loaded.model, graph)
    assert all(torch.equal(read(name), tensor) for name, tensor in expected.items())


def test_what_has_no_products_and_flags_of_training_are_refused() -> None:
    table = Loaded(nn.Sequential(nn.LayerNorm(4)), {"input": torch.zeros(2, 4)})
    with pytest.raises(InputError, match="--weights int8: Sequential has no product with a weight"):
        capture_inference(table, 0, "int8")
    with pytest.raises(InputError, match="--weights: none is 'int4'; there are int8, fp8"):
        api.capture_inference("zoo:mlp", weights="int4", progress=_silent)
    with pytest.raises(InputError, match="--weights goes with --inference"):
        arguments.check("zoo:mlp", {"weights": "int8"})
