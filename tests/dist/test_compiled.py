"""torch.compile on generated programs, whole and block by block: the same numbers to the bit."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from parloom import api, zoo
from parloom import runtime as rt
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import METHODS
from parloom.comparators.configuration import Configuration
from parloom.comparators.handmade import plan
from parloom.cost.clusters import resolve_cluster
from parloom.errors import InputError, VerifyError
from parloom.execute.program import Compiled, compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.lower import lower
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import rewritten
from tests.dist import lowered

ROUTED, MERGED = "experts by all_to_all", "merged products"
CONTEXT = {
    "ring": Configuration(context=2, ring=True),
    "stripes around a ring": Configuration(context=2, ring=True, striped=True),
    "gathered keys": Configuration(context=2),
}
BACKEND = "aot_eager"  # all of torch.compile but the kernels, which would round in another order
STEPS = 3
SIZES: dict[str, Any] = {"seq": 8, "vocab": 16, "width": 16, "depth": 3, "heads": 2}
# Dynamo looks at `.grad` of every input of a graph, leaf or not, and instantiates functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
Case = tuple[Compiled, dict[str, Tensor], dict[str, Tensor]]
Numbers = tuple[list[Tensor], list[Tensor], int]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """What torch imports to compile is there before ranks are forked."""
    torch.compile(torch.sin, backend=BACKEND)(torch.ones(1, requires_grad=True))


@cache
def case(model: str, method: str, microbatches: int = 1) -> Case:
    """A program for two ranks, its weights, its batch."""
    module, batch = lowered.BUILDERS[model]()
    graph = capture(module, batch)
    rule = {ROUTED: "data_parallel", MERGED: "fsdp"}.get(method, method)
    cluster = resolve_cluster("2xH100").cluster
    if method == MERGED:
        graph = rewritten(graph, tuple(map(str, merges(graph))))
    if method in CONTEXT:
        (part,) = plan(graph, replace(CONTEXT[method], microbatch=12), cluster)
        plans = [part.decisions]
        graph = rewritten(graph, part.decisions.rewrites)
    else:
        plans = list(METHODS[rule](graph, cluster, microbatches, 0))
    if method == ROUTED:
        plans = [lowered.routed(graph, one, ("data",)) for one in plans]
    tensors = {n: t.detach().clone() for n, t in parameters_of(module, graph).items()}
    return compile_pcg(lower(graph, plans[-1]), f"{model} {method}"), tensors, batch


def trained(
    model: str, method: str, microbatches: int, blocks: rt.CompiledBlocks | None
) -> Numbers:
    """Losses, owned weights and the number of graphs after a few steps of one rank."""
    made, tensors, batch = case(model, method, microbatches)
    program = made.program
    counters.clear()
    comm = rt.DistributedComm(program.mesh, rt.required_groups(program))
    trainer = rt.Trainer(
        program, tensors, optimizer=sgd, comm=comm, blocks=blocks, exact_random=microbatches > 1
    )
    losses = [trainer.step(batch).loss for _ in range(STEPS)]
    weights = [held.owned.detach() for held in trainer.parts[0].store.helds.values()]
    return losses, weights, counters["stats"]["unique_graphs"]


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def both(model: str, method: str, microbatches: int) -> tuple[Numbers, Numbers]:
    compiled = rt.CompiledBlocks(BACKEND)
    return trained(model, method, microbatches, None), trained(
        model, method, microbatches, compiled
    )


def whole(model: str, method: str) -> tuple[Tensor, Tensor]:
    """The loss of one forward pass, as it is and compiled as one graph."""
    made, tensors, batch = case(model, method)
    program = made.program
    comm = rt.DistributedComm(program.mesh, rt.required_groups(program))
    store = rt.Store(program, tensors.__getitem__, comm, torch.device("cpu"))
    ctx = rt.Context(comm, store=store)
    coordinates = program.mesh.coordinates(comm.rank)
    mine = {s.name: rt.take(batch[s.name], s.dims, program.mesh, coordinates)
            for s in program.inputs}  # fmt: skip
    forward = torch.compile(program.forward, fullgraph=True, backend=BACKEND)
    return program.forward(ctx, mine, ()).loss.detach(), forward(ctx, mine, ()).loss.detach()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "method", "microbatches"),
    [
        ("hf_gpt2", "fsdp", 6),
        ("hf_llama", "megatron", 1),
        ("hf_mixtral", ROUTED, 1),
        ("llama", MERGED, 1),
        *(("llama", method, 1) for method in CONTEXT),
    ],
)
def test_compiled_blocks_train_alike(model: str, method: str, microbatches: int) -> None:
    """Dropout, gathered weights, collectives: all inside; one graph serves every layer."""
    functions = case(model, method, microbatches)[0].pcg.functions
    for plain, compiled in fork_ranks(2, both, model, method, microbatches):
        assert plain[2] == 0
        # Step and microbatch are constants at first, then variables: not one graph per layer.
        assert 0 < compiled[2] <= 3 * len(functions)
        for left, right in zip((*plain[0], *plain[1]), (*compiled[0], *compiled[1]), strict=True):
            assert torch.equal(left, right)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "method"),
    [("hf_gpt2", "megatron"), ("llama", "stripes around a ring")],
)
def test_a_forward_pass_is_one_graph(model: str, method: str) -> None:
    case(model, method)
    for plain, compiled in fork_ranks(2, whole, model, method):
        assert torch.equal(plain, compiled)


@pytest.mark.slow
def test_parallelize_compiles_when_told(tmp_path: Path) -> None:
    """One graph serves three layers and all steps."""
    factory = tmp_path / "model.py"
    build = f"def build():\n    return zoo.build('gpt', batch=4, **{SIZES})\n"
    factory.write_text(f"from parloom import zoo\n\n\n{build}")
    plan = api.plan(f"{factory}:build", cluster="1xcpu", optimizer="sgd")
    found = []
    for backend in (None, BACKEND):
        torch.manual_seed(0)
        model, batch = zoo.build("gpt", batch=4, **SIZES)
        counters.clear()
        trainer = api.parallelize(model, plan, optimizer=sgd, compile_backend=backend)
        losses = [trainer.step(batch).loss for _ in range(2)]
        found.append((losses, counters["stats"]["unique_graphs"]))
    assert [graphs for _, graphs in found] == [0, 1]
    assert torch.equal(torch.stack(found[0][0]), torch.stack(found[1][0]))


def test_an_unknown_backend_is_named_with_its_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'inductor'"):
        rt.CompiledBlocks("inducter")


def test_a_path_too_long_to_be_data_is_refused() -> None:
    with pytest.raises(VerifyError, match="at most 256 bytes"):
        rt.CompiledBlocks().of(sgd, "layer." * 50)
