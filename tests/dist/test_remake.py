"""Recomputation by value, against one device: random values of blocks in random layouts."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD

from parloom import runtime as rt
from parloom.capture import parameters_of
from parloom.comparators.baselines import random_plan
from parloom.errors import VerifyError
from parloom.execute.program import compile_pcg
from parloom.execute.verify import verify
from parloom.ir.graph import Call, Graph, Node
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.plan import ActivationDecision, Decisions, ModelSource, Optimizer, Plan, one_stage
from parloom.ir.text import print_graph
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.rewrite.rewrites import rewritten
from parloom.runtime import remake
from parloom.runtime.remake import Made, Parts, Remaking
from tests.dist.lowered import MESHES, Model, of, small_graph
from tests.equality import TOLERANCE
from tests.zoo_sizes import small

# Models without repeated blocks, and modules of theirs that become blocks.
MODULES: dict[str, tuple[str, ...]] = {
    "alexnet": ("convolutions", "classifier"),
    "candle_uno": ("encoders.descriptors", "encoders.descriptors@1", "top"),
    "cnn": ("blocks.0", "blocks.1"),
    "dlrm": ("bottom", "top"),
    "gnmt": ("encoder", "decoder"),
    "resnext50": ("stages.0.0", "stages.0.1", "stages.3"),
}
NAMES = (
    "bert_large", "bert_large_artifact", "dit_xl", "gpt", "gshard", "inception_v3_artifact",
    "llama", *MODULES,
)  # fmt: skip


@cache
def model(name: str) -> Model:
    module, batch = small(name)
    blocks = [f"block {path}" for path in MODULES.get(name, ())]
    return of(module, batch, rewritten(small_graph(name), blocks))


def random_lists(graph: Graph, seed: int, share: float = 0.5) -> tuple[ActivationDecision, ...]:
    """For every call a random part of its operators, and of what is moved of the others."""
    rng = Random(seed)
    found = []
    for call in graph.main.body:
        if isinstance(call, Call):
            block = graph.by_name[call.function]
            keys = [item.key for item in block.body if isinstance(item, Node)]
            values = tuple(key for key in keys if rng.random() < share)
            movable = [v.name for v in block.inputs] + [key for key in keys if key not in values]
            moves = tuple(name for name in movable if rng.random() < share)
            found.append(ActivationDecision(call.prefix, "recompute", values, moves))
    return tuple(found)


def random_case(found: Model, seed: int, microbatches: int = 1) -> Decisions:
    """A random layout with random storage, in which random values are recomputed."""
    plan = random_plan(found.graph, found.factored, MESHES["2x2"], seed, microbatches)
    plan = replace(plan, activations=random_lists(found.graph, seed))
    verify_decisions(found.graph, plan, found.factored)
    pcg = verify_pcg(lower(found.graph, plan, factored=found.factored))
    assert any(function.remake for function in pcg.functions)
    return plan


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_random_values_in_random_layouts(name: str) -> None:
    found = model(name)
    for seed in range(2 if name in ("gpt", "llama") else 1):
        error, where = found.error(random_case(found, seed))
        assert error < TOLERANCE, where


def test_microbatches() -> None:
    found = model("gpt")
    error, where = found.error(random_case(found, 3, microbatches=2))
    assert error < TOLERANCE, where


MADE_AGAIN = remake._Place.of


def otherwise(place: remake._Place, made: Tensor) -> Tensor:
    """A value that is made again, and not what it was."""
    return MADE_AGAIN(place, made.mul_(1.001) if made.is_floating_point() else made)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_value_that_is_made_again_otherwise_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what is remade reaches the gradients."""
    monkeypatch.setattr(remake._Place, "of", otherwise)
    found = model(name)
    error, _ = found.error(random_case(found, 0))
    assert error > TOLERANCE


def test_the_proof_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with such lists is proved, and not one that makes values again otherwise."""
    module, batch = small("gpt")
    graph = small_graph("gpt")
    decisions = Decisions(one_stage(grid({"x": 2})), activations=random_lists(graph, 0))
    source = ModelSource("zoo:gpt", 4)
    plan = Plan(source, "test", "", Optimizer(), "test", decisions, print_graph(graph))
    tensors = parameters_of(module, graph)
    assert verify(plan, tensors, batch).passed
    monkeypatch.setattr(remake._Place, "of", otherwise)
    report = verify(plan, tensors, batch)
    assert not report.passed
    assert report.first_difference is not None
    assert report.first_difference.startswith("gradient of")


def trained(
    graph: Graph,
    tensors: dict[str, Tensor],
    batch: dict[str, Tensor],
    activations: tuple[ActivationDecision, ...],
    blocks: rt.CompiledBlocks | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of three steps in float32, and the weights after them."""
    pcg = lower(graph, Decisions(activations=activations))
    program = compile_pcg(verify_pcg(pcg), "test").program
    trainer = rt.Trainer(
        program,
        tensors,
        optimizer=lambda named: SGD(named, lr=0.1),
        comm=rt.SingleComm(program.mesh),
        blocks=blocks,
    )
    losses = [trainer.step(batch).loss for _ in range(3)]
    return losses, [held.owned.detach() for held in trainer.parts[0].store.helds.values()]


@pytest.mark.parametrize("name", ["bert_large", "llama", "inception_v3_artifact"])
def test_steps_are_equal_to_the_last_bit(name: str) -> None:
    """Dropout included: what is drawn again is what was drawn."""
    module, batch = small(name)
    graph = small_graph(name)
    tensors = parameters_of(module, graph)
    kept = trained(graph, tensors, batch, ())
    for seed, share in enumerate((0.3, 0.7, 1.0)):
        again = trained(graph, tensors, batch, random_lists(graph, seed, share))
        for one, other in zip(kept, again, strict=True):
            assert all(map(torch.equal, one, other))


def test_blocks_that_drop_values_run_as_written_where_others_are_compiled() -> None:
    module, batch = small("gpt")
    graph = small_graph("gpt")
    tensors = parameters_of(module, graph)
    counters.clear()
    kept = trained(graph, tensors, batch, ())
    again = trained(graph, tensors, batch, random_lists(graph, 0), rt.CompiledBlocks("eager"))
    assert counters["stats"]["unique_graphs"] == 0
    for one, other in zip(kept, again, strict=True):
        assert all(map(torch.equal, one, other))


class Counted:
    """x -> 2x, dropped -> its exponential; counts how often the double is made again."""

    def __init__(self) -> None:
        self.made, self.rows = 0, 5

    def forward(self, x: Tensor) -> tuple[Tensor, Made]:
        double = x * 2
        result = double.exp() + double.square()  # saves `double`, and its exponential
        return double, Made(result, (x,), (double,))

    def again(self, x: Tensor) -> tuple[Tensor, ...]:
        self.made += 1
        return (x[: self.rows] * 2,)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def dropped(counted: Counted, x: Tensor) -> tuple[Tensor, StorageWeakRef]:
    """The result, and what tells whether the memory of the dropped value is still there."""
    remaking = Remaking(as_it_is, as_it_is, Parts())
    with remaking.saving():
        double, made = counted.forward(x)
    remaking.drop(made, counted.again)
    memory = StorageWeakRef(double.untyped_storage())  # type: ignore[no-untyped-call]
    return made.results, memory


def test_dropped_memory_is_free_between_the_passes() -> None:
    counted, x = Counted(), torch.rand(5, requires_grad=True)
    result, memory = dropped(counted, x)
    assert memory.expired()  # type: ignore[no-untyped-call]
    torch.autograd.backward(result.sum(), retain_graph=True)
    assert counted.made == 1
    assert x.grad is not None
    first = x.grad.clone()
    assert torch.equal(first, (2 * (x * 2).exp() + 8 * x).detach())
    torch.autograd.backward(result.sum())  # autograd kept what was made again
    assert counted.made == 1
    assert torch.equal(x.grad, 2 * first)


def test_what_is_kept_goes_with_the_graph() -> None:
    """Without a backward pass, and without the garbage collector."""
    weight, kept = torch.rand(5, requires_grad=True), []

    def block(ctx: rt.Context, prefix: str, x: Tensor) -> Made:
        y = x + 1
        kept.append(StorageWeakRef(y.untyped_storage()))  # type: ignore[no-untyped-call]
        with ctx.again(0):
            z = y.exp()
        return Made(z.sum(), (y,), (z,))

    def block_again(ctx: rt.Context, prefix: str, y: Tensor) -> tuple[Tensor, ...]:
        with ctx.again(0):
            return (y.exp(),)

    program = rt.Program("none", rt.Mesh(()), (), (), lambda *given: rt.Result(weight.sum()))
    comm = rt.SingleComm(program.mesh)
    nothing: dict[str, Tensor] = {}
    store = rt.Store(program, nothing.__getitem__, comm, torch.device("cpu"))
    ctx = rt.Context(comm, store=store)
    gc.disable()
    try:
        result = ctx.call(block, "block", (weight,), (), again=block_again)
        assert not kept[0].expired()  # type: ignore[no-untyped-call]
        del result
        assert kept[0].expired()  # type: ignore[no-untyped-call]
    finally:
        gc.enable()


def test_what_failed_is_made_when_it_is_asked_for_again() -> None:
    counted, x = Counted(), torch.rand(5, requires_grad=True)
    result, _ = dropped(counted, x)
    counted.rows = 0
    with pytest.raises(VerifyError, match="0 bytes, and had 20"):
        torch.autograd.backward(result.sum(), retain_graph=True)
    counted.rows = 5
    torch.autograd.backward(result.sum())
    assert counted.made == 2
    assert x.grad is not None
    assert torch.equal(x.grad, (2 * (x * 2).exp() + 8 * x).detach())


def test_ranks_that_have_nothing_make_it_again_like_others() -> None:
    counted, x = Counted(), torch.rand(0, requires_grad=True)
    result, _ = dropped(counted, x)
    torch.autograd.backward(result.sum())
    assert counted.made == 1


def test_without_gradients_nothing_is_saved() -> None:
    counted, x = Counted(), torch.rand(5)
    result, memory = dropped(counted, x)
    assert memory.expired()  # type: ignore[no-untyped-call]
    assert not result.requires_grad


def masked(again: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of x through a dropout of half of it and a square, both dropped; `again` is what
    the backward pass does in place of the dropout.
    """
    x = torch.arange(1.0, 7.0, requires_grad=True)
    parts = Parts()
    remaking = Remaking(as_it_is, as_it_is, parts)
    with remaking.saving():
        with parts.run(0):
            mask = torch.arange(6) < 3
            memory = StorageWeakRef(mask.untyped_storage())  # type: ignore[no-untyped-call]
            half = rt.apply_mask(x, mask, 0.5)
        made = Made(half.square().sum(), (x,), (half,))
    del mask, half

    def run_again(x: Tensor) -> tuple[Tensor, ...]:
        with parts.run(0):
            return (again(x),)

    remaking.drop(made, run_again)
    results = made.results
    del made
    assert memory.expired()  # type: ignore[no-untyped-call]
    torch.autograd.backward(results)
    assert x.grad is not None
    return x.grad


def test_what_is_inside_of_an_operator_is_dropped_and_made_again() -> None:
    expected = torch.tensor([8.0, 16, 24, 0, 0, 0])
    assert torch.equal(masked(lambda x: rt.apply_mask(x, torch.arange(6) < 3, 0.5)), expected)
    other = masked(lambda x: rt.apply_mask(x, torch.arange(6) < 2, 0.5))
    assert torch.equal(other, torch.tensor([8.0, 16, 0, 0, 0, 0]))
    with pytest.raises(VerifyError, match="an operator that was run again did not save"):
        masked(lambda x: x * 2)
