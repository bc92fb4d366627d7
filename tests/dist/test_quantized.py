"""Collectives that send int8 in blocks, against a dense oracle with the same quantizer."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parloom import runtime as rt
from parloom.comparators.baselines import METHODS, random_plan
from parloom.cost.clusters import load_cluster
from parloom.execute import quantized as reference
from parloom.execute.verify import VerifyReport, assemble, compare, reference_trace, verify
from parloom.ir.plan import Decisions, ModelSource, ParameterDecision, Plan, Storage
from parloom.ir.text import print_graph
from parloom.quantization import BLOCK, LARGEST, in_blocks
from parloom.runtime import quantized
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.search.quantized import in_int8
from tests.dist import lowered, mlp, staged
from tests.dist.lowered import Model

RATE = 0.1


def padded(tensor: Tensor) -> Tensor:
    whole = tensor.new_zeros(in_blocks(tensor.numel()))
    whole[: tensor.numel()] = tensor
    return whole


@settings(max_examples=30)
@given(
    rows=st.integers(1, 3),
    numel=st.integers(1, 3 * BLOCK),
    dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_what_arrives_is_within_half_a_unit_of_its_block(
    rows: int, numel: int, dtype: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    scale = 10.0 ** torch.randint(-6, 6, (), generator=generator).item()
    sent = torch.stack(
        [padded(scale * torch.randn(numel, generator=generator)) for _ in range(rows)]
    ).to(kind)
    payload = quantized.encode(sent)
    size = sent.shape[1]
    assert payload.dtype == torch.int8
    assert payload.shape[1] == size + size // BLOCK * (8 if dtype == "float64" else 4)
    for row, own in zip(sent, payload, strict=True):
        got = quantized.decode(own, size, kind)
        blocks = row.to(got.dtype).view(-1, BLOCK)
        unit = blocks.abs().amax(-1, keepdim=True) / LARGEST
        assert ((got.view(-1, BLOCK) - blocks).abs() <= unit * (0.5 + 1e-3)).all()
        if dtype != "bfloat16":
            assert torch.equal(got, reference.quantized(row))


def test_blocks_that_are_not_finite_stay_so() -> None:
    sent = torch.zeros(1, 4 * BLOCK)
    sent[0, 3], sent[0, BLOCK + 5], sent[0, 2 * BLOCK + 1] = torch.inf, torch.nan, 2.0
    got = quantized.decode(quantized.encode(sent)[0], 4 * BLOCK, torch.float32).view(4, BLOCK)
    assert not got[:2].isfinite().any(1).all()
    assert not got[0].isfinite().all()
    assert not got[1].isfinite().all()
    assert torch.equal(got[2:], sent.view(4, BLOCK)[2:])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_equal_a_dense_oracle(ranks: int) -> None:
    mesh, numel = rt.grid({"x": ranks}), 3 * BLOCK
    generator = torch.Generator().manual_seed(ranks)
    sent = torch.randn(ranks, ranks, numel, generator=generator)
    flats = torch.randn(ranks, 5 * BLOCK, generator=generator)

    def body(comm: rt.Comm) -> tuple[Tensor, Tensor, Tensor]:
        group = quantized.over(comm.group(("x",)), "int8")
        scattered, gathered = torch.empty(numel), torch.empty(ranks, numel)
        group.reduce_scatter(scattered, sent[comm.rank]).wait()
        group.all_gather(gathered, sent[comm.rank, 0]).wait()
        flat = flats[comm.rank].clone()
        group.all_reduce(flat).wait()
        return scattered, gathered, flat

    through = reference.quantized
    total = through(sum(map(through, flats), torch.zeros(())))
    for rank, (scattered, gathered, flat) in enumerate(rt.run_threads(mesh, body)):
        want = sum((through(own[rank]) for own in sent), torch.zeros(()))
        assert torch.allclose(scattered, want, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(scattered, sent[:, rank].sum(0), rtol=1e-4, atol=1e-4)
        assert torch.equal(gathered, torch.stack([through(own[0]) for own in sent]))
        assert torch.allclose(flat, total, rtol=1e-6, atol=1e-6)


class _Beside(nn.Module):
    """A linear layer beside parameters without elements and with one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.none = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear(x) * self.one + self.none.sum()
        return made.square().mean()


def test_parameters_without_elements_are_proved() -> None:
    model = lowered.of(_Beside(), {"x": torch.randn(4, 6)})
    *_, found = METHODS["data_parallel"](model.graph, load_cluster("2xcpu"), 1, 0)
    assert proof(model, in_int8(found, model.graph)).passed


# A whole step of a hand-written program.

Through = Callable[[Tensor], Tensor]


def dense(storage: str, ranks: int, through: Through) -> dict[str, Tensor]:
    """Two steps of SGD on one device: what each rank would add is computed apart, from its rows of
    the batch, and goes `through` the quantizer as it is cut to be sent.
    """
    weights = {name: t.clone() for name, t in mlp.model().state_dict().items()}
    dims = {name: int(name == "down.weight") for name in weights}

    def cut(name: str, tensor: Tensor, function: Through) -> Tensor:
        dim = dims[name]
        rows = -(-tensor.shape[dim] // ranks)
        parts = []
        for index in range(ranks):
            shape = list(tensor.shape)
            shape[dim] = rows
            own = tensor.new_zeros(shape)
            first, last = (min((index + i) * rows, tensor.shape[dim]) for i in (0, 1))
            own.narrow(dim, 0, last - first).copy_(tensor.narrow(dim, first, last - first))
            parts.append(function(own).narrow(dim, 0, last - first))
        return torch.cat(parts, dim)

    chunked = storage != "replicated"
    for step in range(2):
        whole = mlp.model()
        if storage == "zero3":
            read = {name: cut(name, t, through) for name, t in weights.items()}
        else:
            read = weights
        whole.load_state_dict(read)
        batch = mlp.batch(seed=step)
        sums: dict[str, Tensor] = {}
        for rank in range(ranks):
            rows = mlp.BATCH // ranks
            own = {name: t[rank * rows : (rank + 1) * rows] for name, t in batch.items()}
            whole.zero_grad()
            whole(**own).backward()
            for name, parameter in whole.named_parameters():
                if parameter.grad is not None:
                    added = parameter.grad
                    added = cut(name, added, through) if chunked else through(added)
                    sums[name] = sums.get(name, 0) + added
        for name, gradient in sums.items():
            weights[name] = weights[name] - RATE * (gradient if chunked else through(gradient))
    return weights


def trained(storage: str, ranks: int) -> dict[str, Tensor]:
    """The same of the runtime, on threads."""
    mesh = rt.grid({"x": ranks})
    made = mlp.program(mesh, mlp.Layout(("x",), storage=storage))
    sent = {"REDUCE": ("microbatch", "step"), "GATHER": ("forward and backward",)}
    step = tuple(
        replace(node, dtype="int8") if node.when in sent.get(node.action, ()) else node
        for node in made.step
    )

    def body(comm: rt.Comm) -> dict[str, Tensor]:
        trainer = rt.Trainer(
            replace(made, step=step),
            mlp.model().state_dict(),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=RATE),
            comm=comm,
        )
        for index in range(2):
            trainer.step(mlp.batch(seed=index))
        return trainer.state_dict()

    return rt.run_threads(mesh, body)[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("storage", ["replicated", "zero1", "zero2", "zero3"])
def test_steps_equal_one_device_with_the_same_quantizer(storage: str, ranks: int) -> None:
    got, want = trained(storage, ranks), dense(storage, ranks, reference.quantized)
    exact = dense(storage, ranks, lambda tensor: tensor)
    worst = max(float((got[name] - want[name]).abs().max()) for name in want)
    apart = max(float((got[name] - exact[name]).abs().max()) for name in want)
    assert worst < 1e-12
    assert apart > 1e-5, "without the quantizer it is something else"


# Whole plans: the proof.


def random_decisions(model: Model, seed: int) -> Decisions:
    """A random plan on two axes of two ranks, in one or two microbatches; of every third one all
    weights and gradients may be quantized, of others some.
    """
    count, rng = 1 + seed % 2, Random(seed)
    mesh = staged.MESHES[4]
    every = in_int8(random_plan(model.graph, model.factored, mesh, seed, count), model.graph)
    if seed % 3 == 0:
        return every
    some = (
        replace(
            own,
            weight_sent=rng.choice(("", own.weight_sent)),
            gradient_sent=rng.choice(("", own.gradient_sent)),
        )
        for own in every.parameters
    )
    return replace(every, parameters=tuple(some))


def proof(model: Model, decisions: Decisions) -> VerifyReport:
    """As `verify` does it, on threads."""
    pipeline = staged.compiled(model, decisions).pipeline
    (program,) = pipeline.programs
    told = [
        reference.Told(reference.quantized_gradients(program)) for _ in range(pipeline.num_ranks)
    ]
    traces = staged.train(pipeline, model, begin=lambda rank, trainer: told[rank](trainer))
    quantizer = reference.QuantizedReference(program, [own.addends for own in told])
    graph, tensors, batch = model.graph, model.tensors, model.batch
    expected = reference_trace(graph, staged.PLANNED, tensors, batch, quantizer=quantizer)
    got = replace(assemble(traces), addends=quantizer.summed)
    return compare(replace(expected, addends=quantizer.exact), got, pipeline.num_ranks)


@pytest.mark.parametrize(("name", "seed"), [*(("mlp", seed) for seed in range(6)), ("gpt", 3)])
def test_random_plans_are_proved(name: str, seed: int) -> None:
    model = lowered.model(name)
    decisions = random_decisions(model, seed)
    report = proof(model, decisions)
    assert report.passed, str(report)


def data_parallel(model: Model, storage: Storage) -> Decisions:
    """All samples over two ranks, all weights stored alike."""
    cluster = load_cluster("2xcpu")
    *_, found = METHODS["data_parallel"](model.graph, cluster, 1, 0)
    (axis,) = found.mesh.names
    stored = tuple(
        ParameterDecision(entry.target, *[replace(storage, axes=(axis,))] * 3)
        for entry in model.graph.of_kind("parameter")
    )
    return in_int8(replace(found, parameters=stored), model.graph)


def wrong_sums(output: Tensor, received: Tensor) -> None:
    """The last addend is lost."""
    rows = [quantized.decode(row, output.numel(), output.dtype) for row in received[:-1]]
    output.copy_(torch.stack(rows).sum(0))


def truncated(rows: Tensor) -> Tensor:
    """Numbers are a little smaller than they should be."""
    return ENCODE(rows * 0.999)


def scaled(held: ShardedParameter, gradient: Tensor | None) -> None:
    """A rank adds something else than it says."""
    if held.told is not None and gradient is not None:
        held.told(gradient * (1 + 1e-6))


ENCODE = quantized.encode
FAULTS = {
    "an addend is lost": (quantized, "_add_up", wrong_sums, "gradient of"),
    "numbers are encoded otherwise": (quantized, "encode", truncated, ""),
    "addends are others": (ShardedParameter, "tell", scaled, "sum of what ranks add up"),
    "blocks are others": (reference, "BLOCK", BLOCK // 2, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowered.model("mlp")
    decisions = data_parallel(model, Storage())
    assert proof(model, decisions).passed
    where, name, other, words = FAULTS[fault]
    monkeypatch.setattr(where, name, other)
    report = proof(model, decisions)
    assert not report.passed
    assert words in (report.first_difference or "")


def test_plans_are_proved_on_gloo_and_not_as_if_they_were_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lowered.model("mlp")
    decisions = data_parallel(model, Storage())
    text = print_graph(model.graph)
    plan = Plan(ModelSource("zoo:mlp"), "2xcpu", "", staged.PLANNED, "fsdp", decisions, text)
    report = verify(plan, model.tensors, model.batch)
    assert report.passed
    assert "single device with what the plan sends in int8 rounded at the same places" in str(
        report
    )
    monkeypatch.setattr(reference, "quantized", lambda tensor: tensor)
    report = verify(plan, model.tensors, model.batch)
    assert not report.passed
