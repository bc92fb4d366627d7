"""Small captured models, widened to float64, with weights, a batch and the reference's outcome."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.execute.reference import run_step
from parloom.execute.verify import Masks, in_double
from parloom.ir.factors import Factored, factorize
from parloom.ir.graph import Graph, widened
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh, grid
from parloom.ir.ops.experts import NAME as EXPERTS
from parloom.ir.plan import Decisions
from tests.equality import Outcome, difference, parallel
from tests.zoo_sizes import small

Built = tuple[nn.Module, dict[str, Tensor]]
MESHES: dict[str, Mesh] = {"2x2": grid({"x": 2, "y": 2}), "2x3": grid({"x": 2, "y": 3})}


@dataclass(frozen=True)
class Model:
    """A captured model; `expected` is its loss, gradients and new buffers on one device."""

    graph: Graph
    tensors: dict[str, Tensor]
    batch: dict[str, Tensor]

    @cached_property
    def factored(self) -> Factored:
        return factorize(self.graph)

    @cached_property
    def expected(self) -> Outcome:
        trainable = {i.target for i in self.graph.of_kind("parameter") if i.trainable}
        leaves = {n: t.clone().requires_grad_(n in trainable) for n, t in self.tensors.items()}
        results = run_step(self.graph, leaves, self.batch, lambda i, count: Masks(0, i, count))
        loss = results["loss"]
        assert loss is not None
        assert loss.isfinite(), "what is not a number equals what is not a number"
        gradients = {
            n: torch.zeros_like(t) if t.grad is None else t.grad
            for n, t in leaves.items()
            if n in trainable
        }
        kept = {i.target: self.tensors[i.target] for i in self.graph.of_kind("buffer")}
        return Outcome(loss, gradients, {}, kept | results["updates"])

    def error(self, decisions: Decisions) -> tuple[float, str]:
        """How far the plan's program is from the reference, and where."""
        pcg = lower(self.graph, decisions, factored=self.factored)
        return difference(self.expected, parallel(pcg, self.tensors, self.batch))


def of(module: nn.Module, batch: dict[str, Tensor], graph: Graph | None = None) -> Model:
    """Capture a model; weights that start at zero or one get values of their own."""
    graph = widened(graph or capture(module, batch))
    generator = torch.Generator().manual_seed(1)
    saved = module.state_dict()  # without tables, whose values mean something
    tensors = {}
    for name, tensor in parameters_of(module, graph).items():
        wide = in_double(tensor)
        if wide.is_floating_point() and name in saved:
            wide = wide + 0.1 * torch.rand(wide.shape, generator=generator, dtype=wide.dtype)
        tensors[name] = wide
    wide_batch = {name: in_double(tensor) for name, tensor in batch.items()}
    return Model(graph, tensors, wide_batch)


class Sums(nn.Module):
    """Products that are added: with what is whole, with zero, transposed and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.side, self.turned = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.shift = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift = torch.tanh(self.shift)
        x = torch.tanh(x) * shift
        total: Any = x + (shift + self.down(torch.relu(self.up(x))))
        total = sum([total, -self.side(x) / 2])  # 0 + total
        turned = self.turned(x).unflatten(1, (4, 3)).transpose(1, 2)
        total = torch.add(total.unflatten(1, (3, 4)), turned, alpha=-2).flatten(1)
        return (torch.tanh(total) - y).square().mean()


def _sums() -> Built:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 12, 12, generator=generator)
    return Sums(), {"x": x, "y": y}


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(vocab_size=24, n_positions=12, n_embd=24, n_layer=2, n_head=6)
    sizes.use_cache = False
    return GPT2LMHeadModel(sizes).train(), _tokens(24)


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=24, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=12,
        attention_dropout=0.2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(sizes).train(), _tokens(24)


def _mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = MixtralConfig(
        vocab_size=24, hidden_size=24, intermediate_size=36, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=12,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(sizes).train(), _tokens(24)


def routed(graph: Graph, plan: Decisions, axes: tuple[str, ...]) -> Decisions:
    """`plan` with the experts of all mixtures on `axes`, whose tokens are there, too."""
    mixtures = {key for key, node in graph.unfolded() if node.op == EXPERTS}
    nodes = tuple(
        replace(n, factors=(*(f for f in n.factors if f[0] != "e"), ("e", axes)))
        if n.key in mixtures
        else n
        for n in plan.nodes
    )
    return replace(plan, nodes=nodes)


def _tokens(vocabulary: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (12, 12), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
    return {"input_ids": ids, "labels": labels}


BUILDERS: dict[str, Callable[[], Built]] = {
    "mlp": lambda: zoo.build("mlp", batch=12, features=12, hidden=24, depth=2, classes=12),
    "gpt": lambda: zoo.build("gpt", batch=12, seq=12, vocab=24, width=24, depth=2, heads=6),
    "llama": lambda: zoo.build(
        "llama", batch=12, seq=12, vocab=24, width=24, depth=2, heads=6, groups=3, inner=36
    ),
    "cnn": lambda: zoo.build("cnn", batch=12, channels=6, depth=1, classes=12, image=12),
    "dlrm": lambda: zoo.build(
        "dlrm", batch=12, tables=2, rows=24, width=12, hidden=24, dense=12, bag=2
    ),
    "sums": _sums,
    "hf_gpt2": _gpt2,
    "hf_llama": _llama,
    "hf_mixtral": _mixtral,
}


@cache
def small_graph(name: str) -> Graph:
    """The training program of a model of `zoo_sizes.small`, captured once per process."""
    module, batch = small(name)
    return capture(module, batch)


@cache
def model(name: str) -> Model:
    """A model of `BUILDERS`, captured once per process."""
    torch.manual_seed(0)
    return of(*BUILDERS[name]())
