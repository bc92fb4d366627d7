"""Predicted memory against what the generated program really allocates."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from parloom import zoo
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import data_parallel
from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.tasks import BUFFERS, COMMUNICATION, OPTIMIZER, WEIGHTS
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import (
    ActivationDecision,
    Decisions,
    NodeDecision,
    Optimizer,
    ParameterDecision,
    Storage,
    one_stage,
)
from parloom.ir.verify import POLICIES
from parloom.runtime import DistributedComm, Program, SingleComm, Trainer, required_groups
from parloom.search.quantized import in_int8
from tests.dist.allocations import allocated
from tests.zoo_sizes import SMALL

BERT: dict[str, Any] = {
    "batch": 8,
    "seq": 32,
    "vocab": 512,
    "width": 64,
    "depth": 2,
    "heads": 4,
    "inner": 256,
}


def decided(graph: Graph, call: Call, policy: str) -> ActivationDecision:
    """A policy for a whole block, or a pattern of the operators that are recomputed."""
    if policy in POLICIES:
        return ActivationDecision(call.prefix, policy)
    keys = [item.key for item in graph.by_name[call.function].body if isinstance(item, Node)]
    values = tuple(key for key in keys if re.search(policy, key.partition(":")[2]))
    return ActivationDecision(call.prefix, "recompute", values)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "policy", "microbatches", "sizes"),
    [
        ("mlp", "keep", 1, {}),
        ("gpt", "keep", 2, {}),
        ("gpt", "recompute", 1, {}),
        ("gpt", "scaled_dot_product_attention|linear", 1, {}),
        ("gpt", "layer_norm|gelu|add", 2, {}),
        ("llama", "linear", 1, {}),
        ("bert_large", "attention|dropout", 1, BERT),  # masks and probabilities, too
        ("llama", "keep", 1, {}),
        ("cnn", "keep", 1, {}),  # where a window's maximum was
        ("dlrm", "keep", 1, {}),  # the optimizer's quotients of one table while the next is made
        ("bert_large", "keep", 1, BERT),  # attention written out, dropout, gradients of a loss
    ],
)
def test_peak_is_as_predicted(
    name: str, policy: str, microbatches: int, sizes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(name, **sizes)
    graph = capture(model.train(), batch)
    activations = tuple(
        decided(graph, item, policy) for item in graph.main.body if isinstance(item, Call)
    )
    decisions = Decisions(num_microbatches=microbatches, activations=activations)
    pcg = lower(graph, decisions)
    played = simulate(pcg, load_cluster("1xcpu"), decisions, Optimizer("adamw", 2))
    process = played.processes[0]
    # Weights, states and the batch are there before the step.
    before = sum(process.base[component] for component in (WEIGHTS, OPTIMIZER, BUFFERS))
    program = compile_pcg(pcg, "memory").program
    trainer = Trainer(
        program,
        parameters_of(model, graph),
        optimizer=lambda named: AdamW(named, lr=1e-4),
        comm=SingleComm(program.mesh),
    )
    for _ in range(2):
        trainer.step(batch)
    assert process.memory.peak - before == pytest.approx(allocated(trainer, batch), rel=0.05)


def pooled(
    program: Program, tensors: dict[str, Tensor], batch: dict[str, Tensor]
) -> tuple[int, int]:
    """Bytes that a rank holds after three steps: of weights and optimizer states, and in its pool
    of buffers.
    """
    trainer = Trainer(
        program,
        tensors,
        optimizer=lambda named: AdamW(named, lr=1e-4),
        comm=DistributedComm(program.mesh, required_groups(program)),
    )
    for _ in range(3):
        trainer.step(batch)
    states = [t for s in trainer.optimizer.state.values() for t in s.values() if t.dim()]
    stored = [t for held in trainer.parts[0].store.helds.values() for t in (held.kept, held.owned)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in stored}
    buffers = sum(t.nbytes for free in trainer.parts[0].store._pool._free.values() for t in free)
    return sum(memory.values()) + sum(t.nbytes for t in states), buffers


def stored(graph: Graph, *chunks: str) -> tuple[ParameterDecision, ...]:
    """Weight, gradient and state of every parameter in chunks over these axes."""
    storage = tuple(Storage(tuple(axes)) for axes in chunks)
    return tuple(ParameterDecision(e.target, *storage) for e in graph.of_kind("parameter"))


STORAGE = [("", "", "x"), ("", "x", "x"), ("x", "x", "x"), ("", "x", "xy"), ("y", "y", "yx")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_what_is_stored_and_buffers_of_collectives_are_as_predicted(name: str) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(name, batch=8, **SMALL[name])
    graph, mesh = capture(model.train(), batch), grid({"x": 2, "y": 2})
    (parallel,) = data_parallel(graph, load_cluster("4xcpu"))
    nodes = tuple(
        NodeDecision(n.key, tuple((f, ("x", "y")) for f, axes in n.factors if axes))
        for n in parallel.nodes
    )
    programs, said = [], []
    for chunks, (microbatches, sent) in itertools.product(
        STORAGE, ((1, False), (2, False), (1, True))
    ):
        decisions = Decisions(
            one_stage(mesh), nodes, num_microbatches=microbatches,
            parameters=stored(graph, *chunks),
        )  # fmt: skip
        decisions = in_int8(decisions, graph) if sent else decisions
        pcg = lower(graph, decisions)
        programs.append(compile_pcg(pcg, "memory").program)
        played = simulate(pcg, load_cluster("4xcpu"), decisions, Optimizer("adamw", 2))
        base = played.processes[0].base
        said.append((base[WEIGHTS] + base[OPTIMIZER], base[COMMUNICATION]))
    tensors = parameters_of(model, graph)
    found = fork_ranks(4, _pooled_all, programs, tensors, batch)
    assert found[0] == said
    assert [[buffers for _, buffers in rank] for rank in found] == [[b for _, b in said]] * 4
    assert len(set(said)) > 3


def _pooled_all(
    programs: list[Program], tensors: dict[str, Tensor], batch: dict[str, Tensor]
) -> list[tuple[int, int]]:
    return [pooled(program, tensors, batch) for program in programs]


class Regression(nn.Module):
    """A product and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x).relu(), y)


def test_a_mean_lies_in_the_memory_of_what_it_is_of() -> None:
    batch = {"x": torch.rand(512, 256), "y": torch.rand(512, 256)}
    model = Regression()
    graph, decisions = capture(model.train(), batch), Decisions()
    pcg = lower(graph, decisions)
    process = simulate(pcg, load_cluster("1xcpu"), decisions, Optimizer("sgd", 0)).processes[0]
    before = sum(process.base[component] for component in (WEIGHTS, OPTIMIZER, BUFFERS))
    program = compile_pcg(pcg, "memory").program
    trainer = Trainer(
        program,
        parameters_of(model, graph),
        optimizer=lambda named: SGD(named, lr=1e-4),
        comm=SingleComm(program.mesh),
    )
    for _ in range(2):
        trainer.step(batch)
    assert process.memory.peak - before == pytest.approx(allocated(trainer, batch), rel=0.02)
