"""A captured graph equals its model to the bit, folded, unfolded and read back from text."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture import capture, parameters_of
from parloom.ir.fold import unfold
from parloom.ir.graph import Graph, Node
from parloom.ir.text import parse_graph, print_graph
from tests.capture import models
from tests.capture.models import Batch, assert_equal, run_graph

Build = Callable[[], tuple[nn.Module, Batch]]
BUILDS: list[tuple[Build, tuple[str, ...]]] = [
    (models.perceptron, ("sequential",)),
    (models.convolutions, ("convolution_block",)),
    (models.tables, ()),
    (models.gpt2, ("gpt2_block",)),
    (models.llama, ("llama_decoder_layer",)),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def operators(graph: Graph) -> list[str]:
    return [node.op for _, node in graph.unfolded()]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("build", "functions"), BUILDS, ids=lambda p: getattr(p, "__name__", ""))
def test_graph_equals_model(build: Build, functions: tuple[str, ...]) -> None:
    model, batch = build()
    graph = capture(model, batch)
    assert tuple(f.name for f in graph.functions) == functions
    assert_equal(graph, model, batch)
    text = print_graph(graph)
    assert parse_graph(text) == graph
    assert_equal(unfold(parse_graph(text)), model, batch)
    keys = [key for key, _ in graph.unfolded()]
    assert len(set(keys)) == len(keys)
    assert print_graph(capture(model, batch)) == text
    assert "/" not in "".join(node.source for _, node in graph.unfolded())


def test_nodes_know_module_and_line() -> None:
    model, batch = models.gpt2()
    nodes = dict(capture(model, batch).unfolded())
    node = nodes["transformer.h.1.attn.c_attn:addmm#0"]
    assert node.source.startswith("pytorch_utils.py:")
    assert nodes["transformer.h.0.attn:scaled_dot_product_attention#0"].source.startswith(
        "modeling_gpt2.py:"
    )


def test_a_causal_mask_built_while_tracing_is_a_flag() -> None:
    model, batch = models.llama()
    graph = capture(model, batch)
    attention = [n for _, n in graph.unfolded() if n.op == "scaled_dot_product_attention"]
    assert all(n.args[3:] == (None, 0.0, True) for n in attention)
    assert all(n.kwarg("enable_gqa") for n in attention)
    assert not {"index", "cumsum", "__and__", "clone"} & {
        n.op for f in graph.functions for n in f.body if isinstance(n, Node)
    }
    padded = {**batch, "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    padded["attention_mask"][0, 5:] = 0
    assert "is_causal" not in print_graph(capture(model, padded))
    assert_equal(capture(model, padded), model, padded)


def test_tied_weights_are_one_input() -> None:
    model, batch = models.gpt2()
    (tied,) = [i for i in capture(model, batch).of_kind("parameter") if i.aliases]
    assert (tied.target, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))


def test_frozen_parameters_stay_frozen() -> None:
    model, batch = models.perceptron()
    model.get_submodule("layers.0").requires_grad_(False)
    graph = capture(model, batch)
    trainable = {i.target: i.trainable for i in graph.of_kind("parameter")}
    assert not trainable["layers.0.0.weight"]
    assert trainable["layers.1.0.weight"]
    assert_equal(graph, model, batch)
    with pytest.raises(Exception, match="depends on no trainable parameter"):
        capture(model.requires_grad_(False), batch)


def test_batch_norm_updates_are_named() -> None:
    model, batch = models.convolutions()
    graph = capture(model, batch)
    assert [name for name, _ in graph.updates] == sorted(
        f"blocks.{i}.bn.{b}"
        for i in range(2)
        for b in ("running_mean", "running_var", "num_batches_tracked")
    )
    norms = [n for _, n in graph.unfolded() if n.op == "batch_norm"]
    assert [len(n.args) for n in norms] == [8, 8]
    assert [len(n.results) for n in norms] == [3, 3]


def test_two_batch_entries_that_share_a_tensor_stay_two() -> None:
    model, batch = models.gpt2()
    assert batch["input_ids"] is batch["labels"]
    graph = capture(model, batch)
    assert [i.target for i in graph.of_kind("batch")] == ["input_ids", "labels"]
    other = {**batch, "labels": (batch["labels"] + 1) % 37}
    assert_equal(graph, model, other)


def test_evaluation_keeps_outputs_and_needs_no_loss() -> None:
    model, batch = models.convolutions()
    graph = capture(model, batch, training=False)
    assert (graph.training, model.training) == (False, True)
    assert [name for name, _ in graph.outputs] == ["logits"]
    assert not graph.updates
    model.eval()
    found = run_graph(graph, model, batch)
    expected = model(**batch)
    assert torch.equal(found["outputs"]["logits"], expected["logits"])
    assert found["loss"] is not None
    assert torch.equal(found["loss"], expected["loss"])
    bare = nn.Linear(3, 2)
    outputs = capture(bare, {"input": torch.randn(4, 3)}, training=False)
    assert (outputs.loss, outputs.outputs) == (None, (("output_0", "linear"),))


def test_a_loss_function_is_inside() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.model(x)
            return out

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch["y"])

    model, batch = Bare(), {"x": torch.randn(4, 3), "y": torch.randint(2, (4,))}
    graph = capture(model, batch, loss=loss)
    assert [key for key, _ in graph.unfolded()] == ["model:linear#0", ":cross_entropy_loss#0"]
    assert [i.target for i in graph.of_kind("parameter")] == ["model.weight", "model.bias"]
    assert_equal(graph, model, batch, loss)


def test_meta_models_need_no_values() -> None:
    model, batch = models.llama()
    graph = capture(model, batch)
    assert capture(model.to("meta"), batch) == graph


def test_dropout_hook_gives_the_masks() -> None:
    model, batch = models.gpt2()
    graph = capture(model.double(), batch)

    class Keep:
        asked: list[str] = []  # noqa: RUF012

        def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor:
            self.asked.append(key)
            generator = torch.Generator().manual_seed(len(key))
            return (torch.rand(shape, generator=generator) >= p).double()

    hook = Keep()
    first = run_graph(graph, model, batch, dropout=hook)["loss"]
    again = run_graph(unfold(graph), model, batch, dropout=hook)["loss"]
    assert first is not None
    assert again is not None
    assert torch.equal(first, again)
    assert hook.asked[: len(hook.asked) // 2] == hook.asked[len(hook.asked) // 2 :]
    assert "transformer.h.1.attn:scaled_dot_product_attention#0" in hook.asked

    class All:
        def mask(self, key: str, shape: tuple[int, ...], p: float) -> Tensor:
            return torch.full(shape, 1 - p, dtype=torch.float64)

    whole = run_graph(graph, model, batch, dropout=All())["loss"]
    expected = model.eval()(**batch).loss
    assert whole is not None
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_parameters_of_another_model_are_refused() -> None:
    model, batch = models.perceptron()
    graph = capture(model, batch)
    with pytest.raises(Exception, match=r"no 'layers\.0\.0\.weight'"):
        parameters_of(models.Convolutions(), graph)
