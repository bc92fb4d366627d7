"""Small models for the capture tests, and the comparison of a graph with its model."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.capture import parameters_of
from parloom.capture.program import Loss
from parloom.execute.reference import Results, evaluate
from parloom.ir.graph import Graph

Batch = dict[str, Tensor]


class Perceptron(nn.Module):
    """Two equal blocks with dropout; the loss is the first output."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.25)) for _ in range(3)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits, y), logits


class Convolutions(nn.Module):
    """A stem and residual blocks with batch norm; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(ConvolutionBlock(4) for _ in range(2))
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
        h = self.stem(image)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h.mean((2, 3)))
        return {"logits": logits, "loss": F.cross_entropy(logits, label)}


class ConvolutionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn(self.conv(x)), inplace=True)


class Tables(nn.Module):
    """Embedding bags and a dense part: a small DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
        self.top = nn.Linear(4 + 6, 1)

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        z = torch.stack(vectors, 1)
        pairs = z @ z.transpose(1, 2)
        row, column = torch.tril_indices(4, 4, offset=-1)
        logits = self.top(torch.cat([bottom, pairs[:, row, column]], 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), click)


def perceptron() -> tuple[nn.Module, Batch]:
    return Perceptron(), {"x": torch.randn(4, 6), "y": torch.randint(3, (4,))}


def convolutions() -> tuple[nn.Module, Batch]:
    return Convolutions(), {"image": torch.randn(2, 3, 6, 6), "label": torch.randint(5, (2,))}


def tables() -> tuple[nn.Module, Batch]:
    batch = {
        "dense": torch.randn(4, 5),
        "sparse": torch.randint(20, (4, 3, 2)),
        "click": torch.rand(4),
    }
    return Tables(), batch


def gpt2(**sizes: Any) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=3, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **sizes,
    )  # fmt: skip
    ids = torch.randint(37, (2, 8))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def llama(**sizes: Any) -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, loss_type="ForCausalLM", **sizes,
    )  # fmt: skip
    ids = torch.randint(37, (2, 8))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def loss_of(output: object) -> Tensor:
    """The loss by the rule of `capture`."""
    if isinstance(output, dict):
        output = output["loss"]
    if isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output


def run_graph(graph: Graph, model: nn.Module, batch: Batch, **extra: Any) -> Results:
    """The graph on the model's own tensors."""
    state = parameters_of(model, graph)
    tensors = {
        i.value.name: batch[i.target] if i.kind == "batch" else state[i.target]
        for i in graph.inputs
        if i.kind != "constant"
    }
    return evaluate(graph, tensors, **extra)


def assert_equal(graph: Graph, model: nn.Module, batch: Batch, loss: Loss | None = None) -> None:
    """Loss, every gradient and every buffer are the model's, to the bit."""
    twin = copy.deepcopy(model)
    model.zero_grad()
    torch.manual_seed(5)
    found = run_graph(graph, model, batch)
    torch.manual_seed(5)
    output = twin(**{k: v.clone() for k, v in batch.items()})
    expected = loss_of(output) if loss is None else loss(output, batch)
    assert found["loss"] is not None
    assert torch.equal(found["loss"], expected)
    torch.autograd.backward(found["loss"])
    torch.autograd.backward(expected)
    gradients = {n: p.grad for n, p in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert (parameter.grad is None) == (gradient is None), name
        if parameter.grad is not None and gradient is not None:
            assert torch.equal(parameter.grad, gradient), name
    buffers = dict(twin.named_buffers())
    for name, value in found["updates"].items():
        assert torch.equal(value, buffers[name]), name
    written = {n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])}
    assert written <= set(found["updates"])
