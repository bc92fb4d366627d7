"""Mixtures of experts are recognised by what they compute, and split over experts exactly."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import resolve_cluster
from parloom.errors import CaptureError, LayoutError
from parloom.execute.reference import evaluate
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, Node
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.moves import Step
from parloom.ir.ops.experts import NAME, rows_per_expert
from parloom.ir.pcg import PCG, Movement
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from parloom.ir.text import parse_graph, print_graph
from parloom.ir.verify import verify_pcg
from tests.dist import lowered
from tests.equality import TOLERANCE

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 24, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 12,
    "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
Built = tuple[nn.Module, dict[str, Tensor]]


def _mixtral() -> nn.Module:
    return lowered.BUILDERS["hf_mixtral"]()[0]


def _qwen2_moe() -> nn.Module:
    sizes = transformers.Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=12, decoder_sparse_step=1,
        shared_expert_intermediate_size=24, output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    model: nn.Module = transformers.Qwen2MoeForCausalLM(sizes)
    return model


def _deepseek_v3() -> nn.Module:
    sizes = transformers.DeepseekV3Config(
        **SIZES, n_routed_experts=4, moe_intermediate_size=12, first_k_dense_replace=1, n_group=2,
        topk_group=1, kv_lora_rank=12, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=4,
    )  # fmt: skip
    model: nn.Module = transformers.DeepseekV3ForCausalLM(sizes)
    return model


def _qwen3_moe() -> nn.Module:
    sizes = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=12, head_dim=4, decoder_sparse_step=1,
        output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    model: nn.Module = transformers.Qwen3MoeForCausalLM(sizes)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mixtral": (_mixtral, 2),
    "qwen2_moe": (_qwen2_moe, 2),
    "qwen3_moe": (_qwen3_moe, 2),
    "deepseek_v3": (_deepseek_v3, 1),
}


def built(name: str, written: str = "grouped_mm") -> Built:
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    model.set_experts_implementation(written)  # type: ignore[operator]
    return model, lowered.BUILDERS["hf_mixtral"]()[1]


@cache
def captured(name: str, written: str) -> Graph:
    return capture(*built(name, written))


@cache
def subject(name: str) -> lowered.Model:
    return lowered.of(*built(name), captured(name, "grouped_mm"))


def mixtures(graph: Graph) -> list[str]:
    return [key for key, node in graph.unfolded() if node.op == NAME]


def assert_equal(model: nn.Module, batch: dict[str, Tensor], graph: Graph, atol: float) -> None:
    """Loss and gradients of the graph are the model's."""
    state = parameters_of(model, graph)
    values = {
        i.value.name: (batch if i.kind == "batch" else state)[i.target]
        for i in graph.inputs
        if i.kind != "constant"
    }
    ours = evaluate(graph, values)["loss"]
    assert ours is not None
    torch.autograd.backward(ours)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    output = model(**batch)
    wanted = output.loss if hasattr(output, "loss") else output
    torch.autograd.backward(wanted)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=atol)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("written", ["grouped_mm", "batched_mm"])
def test_library_models_are_recognised(name: str, written: str) -> None:
    """Sorted and multiplied by groups, or each row with a copy of its matrix."""
    model, batch = built(name, written)
    graph = captured(name, written)
    assert len(mixtures(graph)) == MODELS[name][1]
    left = {node.op for _, node in graph.unfolded()}
    assert not left & {"sort", "bmm", "index_put", "transformers.grouped_mm_fallback"}
    assert parse_graph(print_graph(graph)) == graph
    assert_equal(model, batch, graph, 1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_baselines_are_equal_and_megatron_splits_experts(name: str) -> None:
    model = subject(name)
    cluster = resolve_cluster("2x2xcpu").cluster
    for method in ("data_parallel", "fsdp", "megatron"):
        for plan in METHODS[method](model.graph, cluster, 1, 0):
            error, where = model.error(plan)
            assert error <= TOLERANCE, (method, where)
    chosen = {n.key: dict(n.factors) for n in plan.nodes}
    for key in mixtures(model.graph):
        assert chosen[key]["e"] == ("tensor",)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_are_equal(name: str, seed: int) -> None:
    model = subject(name)
    mesh = grid({"x": 2, "y": 3 if seed % 2 else 2})
    plan = random_plan(model.graph, model.factored, mesh, seed)
    verify_pcg(lower(model.graph, plan, factored=model.factored))
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


def experts_over(model: lowered.Model, factors: dict[str, tuple[str, ...]]) -> Decisions:
    """A plan that splits nothing but the mixtures."""
    nodes = tuple(NodeDecision(key, tuple(factors.items())) for key in mixtures(model.graph))
    return Decisions(one_stage(grid({"x": 2, "y": 2})), nodes)


@pytest.mark.parametrize(
    "factors",
    [
        {"e": ("x", "y")},
        {"e": ("y", "x")},
        {"e": ("x",), "k": ("y",)},
        {"e": ("x",), "t00": ("y",)},
        {"k": ("x",), "t01": ("y",)},
        {"o": ("x",), "e": ("y",)},
        {"t00": ("x",), "e": ("x",), "k": ("y",)},
        {"t00": ("y", "x"), "e": ("x", "y")},
        {"t00": ("x",), "t01": ("y",), "e": ("y",)},
    ],
    ids=str,
)
def test_experts_are_split(factors: dict[str, tuple[str, ...]]) -> None:
    model = subject("mixtral")
    plan = experts_over(model, factors)
    verify_pcg(lower(model.graph, plan, factored=model.factored))
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


def movements(pcg: PCG) -> list[Step]:
    bodies = (f.body for f in (pcg.main, *pcg.functions))
    return [item.step for body in bodies for item in body if isinstance(item, Movement)]


def test_tokens_and_experts_on_one_axis_gather_and_scatter() -> None:
    """Samples lie on the axis before and after; in between the experts do."""
    model = subject("mixtral")
    cluster = resolve_cluster("4xcpu").cluster
    (plan,) = METHODS["data_parallel"](model.graph, cluster, 1, 0)
    keys = mixtures(model.graph)
    nodes = tuple(
        NodeDecision(n.key, (("e", ("data",)),)) if n.key in keys else n for n in plan.nodes
    )
    plan = replace(plan, nodes=nodes)
    rows = [step.row for step in movements(lower(model.graph, plan, factored=model.factored))]
    assert {"combine_varying", "reduce_scatter"} <= set(rows)
    error, where = model.error(plan)
    assert error <= TOLERANCE, where


def test_rows_never_move() -> None:
    """What is between dispatch and collect has no fixed size: no movement may touch it."""
    model = subject("mixtral")
    for seed in range(10):
        plan = random_plan(model.graph, model.factored, grid({"x": 2, "y": 2}), seed)
        pcg = lower(model.graph, plan, factored=model.factored)
        for function in (pcg.main, *pcg.functions):
            inside = {
                value.name
                for item in function.body
                if not isinstance(item, Movement) and hasattr(item, "node")
                for value in item.results
                if item.node.op in ("parloom.dispatch", "parloom.grouped_mm")
            }
            moved = {i.operand.name for i in function.body if isinstance(i, Movement)}
            assert not inside & moved


# Variants written by hand, of which one thing differs from what is recognised.


class Experts(nn.Module):
    """The sorted way; `change` makes it something else that must stay as it is."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 24) / 4)
        self.down = nn.Parameter(torch.randn(4, 24, 16) / 5)
        self.router = nn.Linear(16, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        change = self.change
        scores, ids = self.router(x).softmax(-1).topk(2)
        expert, order = ids.flatten().sort(descending=change == "descending")
        if change == "descending":
            expert, order = expert.flip(0), order.flip(0)
        rows = x[order // 2]
        ends = torch.histc(expert.float(), 4, 0, 4 if change == "range" else 3).cumsum(0).int()
        inner = F.grouped_mm(rows, self.up, offs=ends).relu()
        if change == "across rows":
            inner = inner - inner.mean(0)
        out = F.grouped_mm(inner, self.down, offs=ends)
        if change == "weights unsorted":
            weighted = out * scores.flatten().unsqueeze(1)
        else:
            weighted = out * scores.flatten()[order].unsqueeze(1)
        if change.startswith("added"):
            base = torch.zeros_like(x) if change != "added to others" else x * 1.0
            at = order // 2 if change != "added in order" else torch.arange(len(order)) // 2
            added: Tensor = base.index_add(0, at, weighted).square().mean()
            return added
        if change == "scatter":
            back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order)))
        else:
            back = order if change == "not put back" else order.argsort()
        total = weighted[back].view(-1, 2, 16).sum(1)
        loss: Tensor = total.square().mean()
        return loss + inner.square().mean() if change == "read elsewhere" else loss


def own(change: str = "") -> Built:
    """In bfloat16, for which torch traces products by groups."""
    torch.manual_seed(0)
    x = torch.randn(32, 16, dtype=torch.bfloat16)
    return Experts(change).to(torch.bfloat16), {"x": x}


@pytest.mark.parametrize("change", ["", "scatter", "added"])
def test_a_module_of_ones_own_is_recognised(change: str) -> None:
    model, batch = own(change)
    graph = capture(model, batch)
    assert len(mixtures(graph)) == 1
    assert_equal(model, batch, graph, 1e-2)


@pytest.mark.parametrize(
    "change",
    [
        "descending",
        "range",
        "across rows",
        "weights unsorted",
        "not put back",
        "read elsewhere",
        "added to others",
        "added in order",
    ],
)
def test_what_computes_something_else_stays_as_it_is(change: str) -> None:
    model, batch = own(change)
    graph = capture(model, batch)
    assert not mixtures(graph)
    assert_equal(model, batch, graph, 1e-2)


def test_loops_over_experts_cannot_be_captured() -> None:
    model, batch = built("mixtral", "eager")
    with pytest.raises(
        CaptureError,
        match=r"model\.layers\.0\.mlp\.experts.*depends on the values.*for experts, .*torch\.bmm",
    ):
        capture(model, batch)


def test_rows_are_counted_as_if_experts_were_equally_busy() -> None:
    for tokens, slots, experts in ((48, 2, 4), (32768, 2, 8), (2**21, 8, 256), (4096, 6, 160)):
        each = rows_per_expert(tokens, slots, experts)
        assert tokens * slots <= each * experts <= tokens * slots * 17 / 16
    assert rows_per_expert(64, 8, 128) == 8  # four would not divide over eight ranks


@pytest.mark.parametrize(
    "step",
    [
        "parloom.grouped_mm",
        ("linear", ("$rows", "$0"), (), (("a", "float64", (2, 2)),)),
        ("sort", ("$rows",), (), ()),
        ("silu", ("$rows",), ("x",), ()),
        ("silu", ("$rows",), (), ("x",)),
    ],
    ids=str,
)
def test_steps_of_a_file_are_checked(step: object) -> None:
    """A plan's text may hold anything; only operators that work row by row become steps."""
    graph = capture(*own())

    def changed(node: Node) -> Node:
        if node.op != NAME:
            return node
        steps = (step, *node.args[5][1:])  # type: ignore[index]
        return replace(node, args=(*node.args[:5], steps))

    body = tuple(changed(i) if isinstance(i, Node) else i for i in graph.main.body)
    with pytest.raises((LayoutError, CaptureError), match=r"is no (step|result|keyword)"):
        factorize(replace(graph, main=replace(graph.main, body=body)))
