"""Small copies of big plans: what is kept, what is told, and that they are proved."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api
from parloom.capture import Loaded, capture, fingerprint, load_abstract, load_model
from parloom.comparators.baselines import megatron, random_plan
from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import plan as by_hand
from parloom.cost.clusters import load_cluster
from parloom.errors import InputError
from parloom.execute import shrink_rewrites
from parloom.execute.shrink import Shrunk, require_memory, shrink, small_model
from parloom.execute.shrink_sizes import (
    ATTEMPTS,
    atoms,
    need_of,
    small_batch,
    small_seq,
    small_sizes,
)
from parloom.execute.shrink_stages import small_mesh
from parloom.execute.verify import VerifyReport, verify
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis, grid
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    ModelSource,
    NodeDecision,
    Optimizer,
    Plan,
    one_stage,
)
from parloom.ir.text import parse_graph, print_graph
from parloom.rewrite.horizontal import fusions
from parloom.rewrite.rewrites import takes_of
from parloom.rewrite.take import Take

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 448, "vocab_size": 1024, "max_position_embeddings": 256,
    "eos_token_id": 1001,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 96, "n_layer": 3,
    "n_head": 12, "vocab_size": 1009, "n_positions": 64, "bos_token_id": 1008,
    "eos_token_id": 1008,
}  # fmt: skip


def config(folder: Path, values: dict[str, object]) -> str:
    pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


def planned(
    spec: str,
    loaded: Loaded,
    decisions: Decisions,
    method: str = "random",
    graph: Graph | None = None,
) -> Plan:
    graph = graph or capture(loaded.model, loaded.batch, loss=loaded.loss)
    source = ModelSource(spec, loaded.batch["x"].shape[0] if "x" in loaded.batch else None)
    return Plan(source, "test", "", Optimizer(), method, decisions, print_graph(graph))


def proved(copy: Shrunk) -> VerifyReport:
    torch.set_num_threads(1)
    return verify(copy.plan, copy.tensors, copy.batch)


def test_mesh_keeps_a_prime_of_every_axis() -> None:
    small = small_mesh(grid({"data": 8, "tensor": 6, "expert": 3}))
    assert [(a.name, a.size) for a in small.axes] == [("data", 2), ("tensor", 2), ("expert", 3)]
    assert small.coordinates(7) == {"data": 1, "tensor": 0, "expert": 1}
    assert {tuple(small.coordinates(r).values()) for r in range(12)} == {
        (d, t, e) for d in range(2) for t in range(2) for e in range(3)
    }


def test_mesh_keeps_order_and_level_of_its_links() -> None:
    fast, slow = PrimeAxis(2, 1, 0), PrimeAxis(5, 8, 1)
    small = small_mesh(Mesh((MeshAxis("x", (fast,)), MeshAxis("y", (slow,)))))
    assert small["x"].primes == (PrimeAxis(2, 1, 0),)
    assert small["y"].primes == (PrimeAxis(5, 2, 1),)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 3, "b": 3}, [3, 3]),
        ({"a": 3, "b": 3, "c": 3}, [2, 2, 3]),
        ({"a": 16, "b": 16, "c": 16, "d": 16}, [2, 2, 2, 2]),
        ({"a": 17, "b": 1}, [2, 1]),
        ({"a": 15}, [3]),
    ],
)
def test_mesh_has_at_most_16_ranks(sizes: dict[str, int], expected: list[int]) -> None:
    assert [axis.size for axis in small_mesh(grid(sizes)).axes] == expected


def test_sizes_keep_ratios() -> None:
    values = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 50257,
        "eos_token_id": [50256, 7], "sliding_window": 4096, "max_position_embeddings": 8192,
        "layer_types": ["full"] * 32,
    }  # fmt: skip
    needs = need_of({8: 4, 2048: 3}, {*atoms(values), 2048}, broad=False)
    assert needs(8) == 4
    assert small_seq(2048, needs, ATTEMPTS[0]) == 6
    small = small_sizes(values, 2, (2048, 6), needs, ATTEMPTS[0])
    assert small["num_key_value_heads"] == 4
    assert small["num_attention_heads"] == 8
    assert small["hidden_size"] % 16 == 0
    assert small["intermediate_size"] * 4096 == small["hidden_size"] * 14336
    assert small["vocab_size"] % 2 == 1
    assert small["eos_token_id"] == [small["vocab_size"] - 1, 7]
    assert "sliding_window" not in small  # longer than the sequence, before and after
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 2
    for attempt in ATTEMPTS[1:]:
        assert small_sizes(values, 2, (2048, 8), needs, attempt)["hidden_size"] < 4096


def test_a_width_below_the_heads_shrinks() -> None:
    """The first width of a diffusion transformer is that of its input channels."""
    values = {"channels": 4, "num_heads": 16, "width": 1152}
    small = small_sizes(values, 2, (64, 4), lambda size: 1, ATTEMPTS[0])
    assert small["width"] % small["num_heads"] == 0


@pytest.mark.parametrize(("unit", "expected"), [(1, 4), (2, 4), (3, 6), (8, 8)])
def test_a_batch_keeps_enough_samples_for_its_statistics(unit: int, expected: int) -> None:
    assert small_batch(64, lambda size: unit, 1, apart=False) == expected
    assert small_batch(2, lambda size: unit, 1, apart=False) == 2
    assert small_batch(64, lambda size: 2, 2, apart=True) == 8


@pytest.mark.slow
def test_config_is_planned_and_proved_small(tmp_path: Path) -> None:
    spec = config(tmp_path, LLAMA)
    plan = api.plan(
        spec,
        cluster="1x8xH100",
        devices=8,
        batch=32,
        seq=64,
        method="data_parallel",
        microbatches=4,
    )
    report = api.verify(plan, shrink=True)
    assert report.passed, report
    before = " x ".join(f"{a.name}={a.size}" for a in plan.decisions.mesh.axes)
    for part in (
        "2 of 3 layers", "hidden_size 128 -> ", "num_key_value_heads 4 -> 2", "seq 64 -> 4",
        f"mesh {before} -> 2", "microbatches 4 -> 2",
    ):  # fmt: skip
        assert part in report.shrunk, part
    assert "not kept" not in report.shrunk
    assert report.shrunk in str(report)


def test_padded_vocabulary_is_kept(tmp_path: Path) -> None:
    spec = config(tmp_path, GPT2)
    loaded = load_model(spec, batch=4, seq=32)
    graph = capture(loaded.model, loaded.batch, loss=loaded.loss)
    *_, decisions = megatron(graph, load_cluster("1x4xH100"))
    assert decisions.rewrites == ("pad transformer.wte.weight 1009 1012",)
    plan = replace(planned(spec, loaded, decisions), source=ModelSource(spec, 4, 32))
    copy = shrink(plan, loaded)
    assert copy.plan.decisions.rewrites == ("pad transformer.wte.weight 61 62",)
    assert proved(copy).passed


def test_every_decision_is_kept() -> None:
    loaded = load_model("zoo:llama", batch=8, seq=64)
    graph = capture(loaded.model, loaded.batch)
    decisions = random_plan(graph, factorize(graph), grid({"x": 4}), seed=3)
    plan = replace(planned("zoo:llama", loaded, decisions), source=ModelSource("zoo:llama", 8, 64))
    copy = shrink(plan, loaded)
    assert "not kept" not in copy.text
    small = copy.plan.decisions
    assert small.parameters == decisions.parameters
    assert [(n.key, n.factors) for n in small.nodes] == [
        (n.key, n.factors) for n in decisions.nodes
    ]
    report = proved(copy)
    assert report.passed, report


def test_what_cannot_be_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parloom.execute.shrink.ATTEMPTS", ATTEMPTS[:1])
    loaded = load_model("zoo:gpt", batch=8, seq=16)
    graph = capture(loaded.model, loaded.batch)
    key = "blocks.0.attention.qkv:linear#0"
    flat = next(f for f in graph.flat() if f.key == key)
    third = next(f for f, n in factorize(graph).rule(flat.function, flat.node).sizes if n == 3)
    node = NodeDecision(key, ((third, ("x",)),))
    decisions = Decisions(one_stage(grid({"x": 3, "y": 3, "z": 2})), (node,))
    plan = replace(planned("zoo:gpt", loaded, decisions), source=ModelSource("zoo:gpt", 8, 16))
    copy = shrink(plan, loaded)
    assert f"not kept: {key} ({third} on x): {third} = 3 does not divide by 2" in copy.text


def fused_llama(folder: Path) -> tuple[Plan, Loaded, list[Take]]:
    """A plan with calls that are one in the sizes of the model."""
    spec = config(folder, LLAMA)
    loaded = load_model(spec, batch=8, seq=32)
    graph = capture(loaded.model, loaded.batch)
    wanted = ("neg_along_d1", "mul_along_d1")
    found = [
        next(take for take in fusions(graph, own) if take.rules == (rule,))
        for own, rule in zip((graph.functions[0], graph.main), wanted, strict=True)
    ]
    mesh = one_stage(grid({"x": 4}))
    decisions = Decisions(mesh, rewrites=tuple(map(str, found)))
    plan = planned(spec, loaded, decisions, graph=graph)
    return replace(plan, source=ModelSource(spec, 8, 32)), loaded, found


def test_rewrites_with_sizes_are_found_again_and_proved(tmp_path: Path) -> None:
    plan, loaded, found = fused_llama(tmp_path)
    copy = shrink(plan, loaded)
    assert "not kept" not in copy.text
    again = takes_of(copy.plan.decisions.rewrites)
    assert [(t.function, t.values, t.rules) for t in again] == [
        (t.function, t.values, t.rules) for t in found
    ]
    assert all(own.call != other.call for own, other in zip(again, found, strict=True))
    report = proved(copy)
    assert report.passed, report


def test_sizes_are_found_for_rewrites_that_are_no_fusions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shrink_rewrites, "_fused", lambda *_: ())
    plan, loaded, found = fused_llama(tmp_path)
    copy = shrink(plan, loaded)
    assert len(copy.plan.decisions.rewrites) == len(found)
    assert "not kept" not in copy.text


def test_a_rewrite_that_is_not_proved_in_the_copy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, loaded, found = fused_llama(tmp_path)
    monkeypatch.setattr(shrink_rewrites, "_fused", lambda *_: ())
    monkeypatch.setattr(shrink_rewrites, "MOST_SIZES", 0)
    copy = shrink(plan, loaded)
    assert not copy.plan.decisions.rewrites
    for take in found:
        where = f"{take.rules[0]} of {', '.join(take.values)} in {take.function}"
        assert f"not proved in the copy: rewrite {where}: with no sizes" in copy.text


def test_big_models_are_planned_without_weights(tmp_path: Path) -> None:
    for spec in ("zoo:llama", config(tmp_path, LLAMA)):
        real = load_model(spec, batch=2, seq=16, dtype="bfloat16")
        found = load_abstract(spec, batch=2, seq=16, dtype="bfloat16", limit=1000)
        assert all(p.is_meta for p in found.model.parameters())
        assert fingerprint(found.model, found.batch) == fingerprint(real.model, real.batch)
        small = load_abstract(spec, batch=2, seq=16)
        assert not any(p.is_meta for p in small.model.parameters())
    assert capture(found.model, found.batch) == capture(real.model, real.batch)


def test_proof_of_a_whole_big_model_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20)
    with pytest.raises(InputError, match=r"needs 32 TiB.*--shrink"):
        require_memory(model, "big")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.down(F.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Indexed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for index in range(5):
            x = self.blocks[index](x)
        return x.square().mean()


def of_factory(model: nn.Module, batch: int, mesh: Mesh, seed: int = 0) -> tuple[Plan, Loaded]:
    loaded = Loaded(model, {"x": torch.randn(batch, 8)})
    graph = capture(loaded.model, loaded.batch)
    decisions = random_plan(graph, factorize(graph), mesh, seed)
    return planned("net.py:make", loaded, decisions), loaded


def test_factory_keeps_blocks_that_are_decided_differently() -> None:
    plan, loaded = of_factory(Net(8, 6), 16, grid({"x": 8}))
    graph = parse_graph(plan.graph)
    factored = factorize(graph)
    nodes = []
    for flat in graph.flat():
        sizes = dict(factored.rule(flat.function, flat.node).sizes)
        wanted = 8 if "blocks.4." in flat.key else 16  # the width instead of the samples
        factor = next((f for f, size in sizes.items() if size == wanted), None)
        if factor is not None and flat.key.startswith("blocks."):
            nodes.append(NodeDecision(flat.key, ((factor, ("x",)),)))
    decisions = Decisions(one_stage(plan.decisions.mesh), tuple(nodes))
    copy = shrink(replace(plan, decisions=decisions), loaded)
    assert "2 of 6 blocks (0, 4)" in copy.text
    assert "mesh x=8 -> 2" in copy.text
    assert "batch 16 -> 4" in copy.text
    report = proved(copy)
    assert report.passed, report


class Headed(Net):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x)).square().mean()


def test_recomputed_values_and_blocks_that_were_made_are_kept() -> None:
    plan, loaded = of_factory(Headed(8, 6), 16, grid({"x": 4}))
    head = ActivationDecision("head", "recompute", ("1:tanh#0",))
    lists = [
        ActivationDecision(f"blocks.{i}", "recompute", ("up:linear#0",), ("hidden",) * (i == 3))
        for i in range(6)
    ]
    decisions = Decisions(
        one_stage(plan.decisions.mesh), activations=(*lists, head), rewrites=("block head",)
    )
    copy = shrink(replace(plan, decisions=decisions), loaded)
    small = copy.plan.decisions
    assert small.rewrites == ("block head",)
    other = replace(lists[3], prefix="blocks.1")
    assert small.activations == (lists[0], other, head)
    assert proved(copy).passed


def test_factory_that_needs_all_its_blocks_keeps_them() -> None:
    plan, loaded = of_factory(Indexed(8, 5), 16, grid({"x": 4}))
    copy = shrink(plan, loaded)
    assert "blocks" not in copy.text
    assert len(parse_graph(copy.plan.graph).of_kind("parameter")) == 20
    assert proved(copy).passed


def test_nothing_to_shrink() -> None:
    plan, loaded = of_factory(Net(8, 2), 2, grid({"x": 2}))
    with pytest.raises(InputError, match=r"nothing of net.py:make can be shrunk.*without --shrink"):
        shrink(plan, loaded)


def test_not_enough_to_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parloom.execute.shrink.MAX_WEIGHTS", 100)
    plan, loaded = of_factory(Net(8, 3), 4, grid({"x": 2}))
    with pytest.raises(InputError, match=r"cannot be shrunk enough: .* parameters remain"):
        shrink(plan, loaded)


BERT_LARGE = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 1024,
    "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip


def test_a_small_model_needs_no_plan(tmp_path: Path) -> None:
    cases = ((config(tmp_path, BERT_LARGE), "num_hidden_layers"), ("zoo:bert_large", "depth"))
    for spec, layers in cases:
        loaded = load_abstract(spec, limit=0)
        found = small_model(ModelSource(spec), loaded, seed=3)
        assert found is not None
        small, text = found
        assert f"{layers} 24 -> 2" in text
        assert "seq 512 -> 4" in text
        assert sum(p.numel() for p in small.model.parameters()) < 1_000_000
        capture(small.model, small.batch, loss=small.loss)
        again = small_model(ModelSource(spec), loaded, seed=3)
        assert again is not None
        for one, other in zip(small.model.parameters(), again[0].model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_small_model_that_stays_big_is_none() -> None:
    model = Net(8, 2)
    assert small_model(ModelSource("net.py:make"), Loaded(model, {"x": torch.randn(2, 8)})) is None


class Odd(Net):
    """One block has another setting, far from the first."""

    def __init__(self) -> None:
        super().__init__(8, 9)
        for index, block in enumerate(self.blocks):
            block.index, block.scale = index, 0.5 if index == 6 else 1.0  # type: ignore[assignment]


def test_a_small_factory_model_has_a_block_of_each_makeup() -> None:
    made = Odd()
    odd = made.blocks[6]
    found = small_model(ModelSource("net.py:make"), Loaded(made, {"x": torch.randn(64, 8)}))
    assert found is not None
    assert found[1] == "2 of 9 blocks, batch 64 -> 4"
    assert list(found[0].model.blocks)[1] is odd  # type: ignore[arg-type]
    whole = Indexed(8, 5)
    kept = small_model(ModelSource("net.py:make"), Loaded(whole, {"x": torch.randn(64, 8)}))
    assert kept is not None
    assert kept[1] == "batch 64 -> 4"
    assert len(whole.blocks) == 5


def test_stripes_are_over_the_ranks_of_the_small_mesh() -> None:
    loaded = load_abstract("zoo:gpt", batch=2, seq=64)
    graph = capture(loaded.model, loaded.batch, loss=loaded.loss)
    chosen = Configuration(context=8, microbatch=2, ring=True, striped=True)
    (part,) = by_hand(graph, chosen, load_cluster("1x8xA100"))
    source = ModelSource("zoo:gpt", 2, 64)
    plan = Plan(source, "test", "", Optimizer(), "by hand", part.decisions, print_graph(graph))
    assert part.decisions.rewrites == ("stripe input_ids 1 8", "stripe labels 1 8")
    copy = shrink(plan, loaded)
    assert copy.plan.decisions.rewrites == ("stripe input_ids 1 2", "stripe labels 1 2")
    assert "not kept" not in copy.text
    assert proved(copy).passed
