"""Weights of merged products in one memory: what users, optimizers and checkpoints see of them."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from parloom import runtime as rt
from parloom.capture import capture, parameters_of
from parloom.comparators.baselines import METHODS
from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.errors import VerifyError
from parloom.execute import checkpoint
from parloom.execute.program import compile_pcg
from parloom.execute.ranks import fork_ranks
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.lower_stages import lower_stages
from parloom.ir.plan import Decisions, ParameterDecision, Storage
from parloom.ir.plan import Optimizer as Planned
from parloom.ir.stages import stage_items
from parloom.ir.verify import verify_pcg
from parloom.rewrite.merge import merges
from parloom.rewrite.rewrites import rewritten
from parloom.runtime.sharded_parameter import ShardedParameter
from parloom.runtime.split_backward import SplitBackward
from tests.dist import lowered, staged
from tests.dist.allocations import Allocations, allocated

torch.set_num_threads(1)
CLUSTER = "4xcpu"
STEPS = 3
Named = list[tuple[str, nn.Parameter]]
Tensors = dict[str, Tensor]


class Block(nn.Module):
    """Queries, keys and values, of unequal widths where several heads share these; gate and up."""

    def __init__(self, width: int, share: int) -> None:
        super().__init__()
        self.share, inner = share, width + width // 2
        widths = (width, width // share, width // share)
        self.q, self.k, self.v = (nn.Linear(width, n) for n in widths)
        self.out = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = ((self.q, 8), (self.k, 8 // self.share), (self.v, 8 // self.share))
        q, k, v = (own(x).unflatten(-1, (n, -1)).transpose(1, 2) for own, n in heads)
        if self.share > 1:
            k, v = (part.repeat_interleave(self.share, 1) for part in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        made: Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return made


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self, width: int, share: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, share) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


GROUPS = [
    tuple(f"blocks.{i}.{name}.{kind}" for name in names)
    for i in range(2)
    for names, kind in (("qkv", "weight"), ("qkv", "bias"), (("gate", "up"), "weight"))
]


FROZEN = "blocks.0.k.weight"


def model(frozen: str = "", width: int = 32, share: int = 2) -> Blocks:
    torch.manual_seed(0)
    made = Blocks(width, share).double()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name != frozen)
    return made


@cache
def weights() -> Tensors:
    """Drawn once: ranks are threads here."""
    return parameters_of(model(), merged())


def batch(width: int = 32) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(12, 8, width, generator=generator, dtype=torch.float64)}


@cache
def merged(frozen: str = "", width: int = 32, share: int = 2) -> Graph:
    graph = capture(model(frozen, width, share), batch(width))
    return rewritten(graph, tuple(map(str, merges(graph))))


def stored(plan: Decisions, graph: Graph, *chunks: tuple[str, ...]) -> Decisions:
    """`plan` with weights, gradients and optimizer states in chunks over these axes."""
    storage = tuple(Storage(axes) for axes in chunks)
    entries = graph.of_kind("parameter")
    return replace(plan, parameters=tuple(ParameterDecision(e.target, *storage) for e in entries))


def plans(graph: Graph) -> Iterator[tuple[str, Decisions]]:
    cluster, none = load_cluster(CLUSTER), ()
    (data,) = METHODS["data_parallel"](graph, cluster, 1, 0)
    (twice,) = METHODS["data_parallel"](graph, cluster, 3, 0)
    yield "data", data
    yield "zero1", stored(data, graph, none, none, ("data",))
    yield "zero2 in microbatches", stored(twice, graph, none, ("data",), ("data",))
    yield "zero3", stored(data, graph, ("data",), ("data",), ("data",))
    tensor, only = METHODS["megatron"](graph, cluster, 1, 0)
    yield "tensor", only
    yield "tensor and zero1", stored(tensor, graph, none, none, ("data",))
    yield "tensor and zero3", stored(tensor, graph, ("data",), ("data",), ("data",))


weights()
PLANS = [name for name, _ in plans(merged())]


@cache
def program(name: str, frozen: str = "", master: str | None = None) -> rt.Program:
    plan = replace(dict(plans(merged(frozen)))[name], master_dtype=master)
    return compile_pcg(verify_pcg(lower(merged(frozen), plan)), name).program


def by_name(named: Named) -> Optimizer:
    """Groups that part what lies in one memory."""
    flat = [p for n, p in named if n.endswith("bias")]
    keys = [p for n, p in named if n.endswith(("k.weight", "up.weight"))]
    other = [p for _, p in named if not any(p is own for own in (*flat, *keys))]
    groups: list[dict[str, Any]] = [
        {"params": flat, "weight_decay": 0.0},
        {"params": keys, "lr": 3e-2, "betas": (0.8, 0.9)},
        {"params": other, "weight_decay": 0.2},
    ]
    return AdamW(groups, lr=1e-2, eps=1e-3)


class Clipped(SGD):
    """Clips the elements of each gradient by a bound of its parameter, and adds momentum."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    bound = 1e-3 if group["momentum"] else 1e-4
                    parameter.grad.clamp_(-bound, bound)
        return super().step(closure)


def clipped(named: Named) -> Optimizer:
    """Of what lies in one memory, some are clipped by another bound."""
    some = [p for n, p in named if "k." in n or "gate" in n]
    rest = [p for n, p in named if not ("k." in n or "gate" in n)]
    groups: list[dict[str, Any]] = [{"params": some, "momentum": 0.9}, {"params": rest}]
    return Clipped(groups, lr=1.0)


class Normed(SGD):
    """Clips the norm of each gradient: no function of elements, so for whole tensors alone."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
        return super().step(closure)


class Rebinding(Optimizer):
    """Gives parameters other memory in the place of writing to theirs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter - 0.1 * parameter.grad


def owned(named: Named) -> list[nn.Parameter]:
    return [p for _, p in named if p.requires_grad]


MAKERS: dict[str, Callable[[Named], Optimizer]] = {
    "groups": by_name,
    "clipped": clipped,
    "rebinding": lambda named: Rebinding(owned(named)),
}


def alone(maker: Callable[[Named], Optimizer], frozen: str = "") -> Tensors:
    """The weights of plain PyTorch after a few steps."""
    plain = model(frozen)
    optimizer = maker([(n, p) for n, p in plain.named_parameters() if p.requires_grad])
    for _ in range(STEPS):
        optimizer.zero_grad()
        plain(**batch()).backward()
        optimizer.step()
    return {n: p.detach() for n, p in plain.named_parameters()}


def trainer(made: rt.Program, comm: rt.Comm, maker: Callable[[Named], Optimizer]) -> rt.Trainer:
    return rt.Trainer(made, weights(), optimizer=maker, comm=comm)


def memories(one: rt.Trainer) -> list[tuple[int, int, int]]:
    """Of every weight that lies whole beside others: its memory, where it begins and ends there."""
    held = one.parts[0].store.helds
    weights = [held[n].weight for group in one.parts[0].program.adjacent for n in group]
    return [
        (w.untyped_storage().data_ptr(), w.data_ptr(), w.data_ptr() + w.nbytes)
        for w in weights
        if w is not None
    ]


def assert_in_place(one: rt.Trainer) -> None:
    """All weights of a group, and what is updated of them, lie where they did."""
    for group in one.parts[0].program.adjacent:
        held = [one.parts[0].store.helds[name] for name in group]
        for own in held:
            assert own.has_master or own.owned.data_ptr() == own.stored.data_ptr()
        whole = [own.weight for own in held if own.weight is not None]
        for before, after in itertools.pairwise(whole):
            assert before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
            assert before.data_ptr() + before.nbytes == after.data_ptr()


def assert_close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", PLANS)
def test_training_equals_plain_pytorch(name: str, maker: str) -> None:
    """Parameter groups, clipping by tensor, and other memory than the parameter's own."""
    made = program(name)
    # Biases of partial sums are zero on all ranks but one.
    left_out = {g for g in GROUPS if g[0].endswith("bias")} if "tensor" in name else set()
    assert {*GROUPS} - left_out <= {*made.adjacent} <= {*GROUPS}
    expected = alone(MAKERS[maker])

    def body(comm: rt.Comm) -> Tensors:
        one = trainer(made, comm, MAKERS[maker])
        for _ in range(STEPS):
            one.step(batch())
            assert_in_place(one)
        return one.state_dict()

    for state in rt.run_threads(made.mesh, body):
        assert_close(state, expected)


def test_norms_of_tensors_are_those_of_the_users_tensors() -> None:
    def maker(named: Named) -> Optimizer:
        return Normed([p for _, p in named], lr=10.0)

    def body(comm: rt.Comm) -> Tensors:
        one = trainer(program("data"), comm, maker)
        for _ in range(STEPS):
            one.step(batch())
        return one.state_dict()

    assert_close(rt.run_threads(program("data").mesh, body)[0], alone(maker))


@pytest.mark.parametrize("name", ["data", "zero1", "zero3"])
def test_what_is_frozen_lies_alone(name: str) -> None:
    """Its product is one with the others', and it has no gradient."""
    made = program(name, FROZEN)
    assert list(made.adjacent) == [g for g in GROUPS if FROZEN not in g]

    def body(comm: rt.Comm) -> tuple[Tensors, bool]:
        one = trainer(made, comm, by_name)
        for _ in range(STEPS):
            one.step(batch())
        held = one.parts[0].store.helds[FROZEN]
        return one.state_dict(), held.owned.grad is None and not held.owned.requires_grad

    expected = alone(by_name, FROZEN)
    for state, untouched in rt.run_threads(made.mesh, body):
        assert untouched
        assert_close(state, expected)


@pytest.mark.parametrize("name", ["data", "zero1", "zero3", "tensor"])
def test_memory_stays_where_it_is(name: str) -> None:
    """Through steps, loads of weights and of a trainer's own shards, and changes by hand."""
    made = program(name)

    def body(comm: rt.Comm) -> None:
        one = trainer(made, comm, by_name)
        before = memories(one)
        assert bool(before) is (name != "zero3")
        one.step(batch())
        one.load_state_dict(one.state_dict())
        with torch.no_grad():
            for shard in one.shards():
                shard.tensor.copy_(shard.tensor.clone())
        one.refresh()
        for held in one.parts[0].store.helds.values():
            held.owned.data = held.owned.data.clone()
        one.step(batch())
        assert_in_place(one)
        assert memories(one) == before

    rt.run_threads(made.mesh, body)


def test_another_program_may_not_take_others_for_neighbors() -> None:
    """Views would be of memory that is something else, which nothing need notice."""
    made = program("data")
    apart = replace(made, adjacent=())

    def body(comm: rt.Comm) -> None:
        for laid in (made, apart):
            rt.Trainer(laid, weights(), optimizer=by_name, comm=comm, evaluation=made)

    with pytest.raises(VerifyError, match="lie as another program says"):
        rt.run_threads(made.mesh, body)


def test_memory_that_was_left_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bringing weights back, products find no memory behind the first weight."""
    monkeypatch.setattr(ShardedParameter, "put_back", lambda self: None)

    def body(comm: rt.Comm) -> None:
        one = trainer(program("data"), comm, MAKERS["rebinding"])
        before = memories(one)
        one.step(batch())
        assert memories(one) != before
        one.step(batch())

    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        rt.run_threads(program("data").mesh, body)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad])
def test_fused_optimizers_and_those_of_many_tensors(kind: Any, fused: bool) -> None:
    """They compute in place on views, too."""

    def maker(named: Named) -> Optimizer:
        how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
        how |= {} if kind is SGD else {"eps": 1e-3}  # of keys' biases the gradient is zero
        made: Optimizer = kind([p for _, p in named], lr=1e-2, **how)
        return made

    made = program("tensor")

    def body(comm: rt.Comm) -> Tensors:
        one = trainer(made, comm, maker)
        for _ in range(STEPS):
            one.step(batch())
        assert_in_place(one)
        return one.state_dict()

    assert_close(rt.run_threads(made.mesh, body)[0], alone(maker))


def test_masters_are_mapped_and_then_cast() -> None:
    """Weights lie in one memory, masters by themselves."""
    graph = merged()
    (data,) = METHODS["data_parallel"](graph, load_cluster(CLUSTER), 1, 0)
    specs = compile_pcg(lower(graph, data), "masters").program
    parameters = tuple(
        replace(spec, dtype="bfloat16", master_dtype="float32") for spec in specs.parameters
    )
    inputs = tuple(replace(spec, dtype="bfloat16") for spec in specs.inputs)
    made = replace(specs, parameters=parameters, inputs=inputs)
    given = {name: tensor.bfloat16() for name, tensor in batch().items()}

    def body(comm: rt.Comm) -> None:
        one = trainer(made, comm, by_name)
        one.step(given)
        assert_in_place(one)
        for held in one.parts[0].store.helds.values():
            assert held.has_master
            assert torch.equal(held.stored, held.owned.detach().bfloat16())

    rt.run_threads(made.mesh, body)


def test_gradients_of_one_product_are_views_of_one_memory() -> None:
    """Where nothing reduces them: they are neither copied nor counted twice."""
    made = compile_pcg(lower(merged(), Decisions()), "alone").program
    one = trainer(made, rt.SingleComm(made.mesh), by_name)
    one.step(batch())
    helds = one.parts[0].store.helds
    for group in made.adjacent:
        gradients = [helds[name].owned.grad for name in group]
        assert len({g.untyped_storage().data_ptr() for g in gradients if g is not None}) == 1


def test_groups_that_cannot_be_are_refused() -> None:
    made, comm = program("zero3"), rt.run_threads

    def store(changed: rt.Program) -> Any:
        return comm(changed.mesh, lambda own: trainer(changed, own, by_name))

    turned = (GROUPS[0][::-1],)
    with pytest.raises(VerifyError, match=r"k\.weight is not gathered behind .*v\.weight"):
        store(replace(made, adjacent=turned))
    with pytest.raises(VerifyError, match="cannot lie in one memory"):
        store(replace(program("data"), adjacent=(GROUPS[0], GROUPS[0])))
    frozen = program("data", FROZEN)
    with pytest.raises(VerifyError, match="cannot lie in one memory"):
        store(replace(frozen, adjacent=(GROUPS[0],)))


def saved(made: rt.Program, folder: Path | None, kept: Path | None) -> dict[str, Any]:
    """Train, from a checkpoint if there is one, and save: weights, states and all else."""
    torch.set_num_threads(1)
    one = rt.Trainer(
        made,
        weights(),
        optimizer=by_name,
        comm=rt.DistributedComm(made.mesh, rt.required_groups(made)),
    )
    if folder is not None:
        checkpoint.load(one, folder)
    else:
        for _ in range(2):
            one.step(batch())
    assert_in_place(one)
    if kept is not None:
        checkpoint.save(one, kept).wait()
    parts = {shard.name: shard.tensor.clone() for shard in one.shards() if made.mesh.num_ranks == 1}
    state = one.state_dict()
    one.step(batch())
    return {"state": state, "parts": parts, "after": one.state_dict()}


@pytest.mark.parametrize("name", ["data", "zero1", "zero3", "tensor and zero3"])
def test_checkpoints_have_the_users_tensors(name: str, tmp_path: Path) -> None:
    """Of merged products in one memory, and of the model as it is on one device: to the bit, and
    both go on alike. In the other direction, too.
    """
    plain = compile_pcg(lower(capture(model(), batch()), Decisions()), "plain").program
    made = program(name)
    first = fork_ranks(made.mesh.num_ranks, saved, made, None, tmp_path / "a")
    (then,) = fork_ranks(1, saved, plain, tmp_path / "a", tmp_path / "b")
    again = fork_ranks(made.mesh.num_ranks, saved, made, tmp_path / "b", tmp_path / "c")
    (last,) = fork_ranks(1, saved, plain, tmp_path / "c", None)
    assert {key.rpartition("/")[0] for key in then["parts"]} == {
        "", "optimizer/exp_avg", "optimizer/exp_avg_sq",
    }  # fmt: skip
    for ranks in (first, again, [last]):
        for found in ranks:
            for key, tensor in then["state"].items():
                assert torch.equal(found["state"][key], tensor), key
            assert_close(found["after"], then["after"])
    for key, tensor in then["parts"].items():
        assert torch.equal(last["parts"][key], tensor), key
    assert then["state"].keys() == dict(model().named_parameters()).keys()


def measured(made: rt.Program, tensors: Tensors, given: Tensors) -> int:
    torch.set_num_threads(1)
    one = rt.Trainer(
        made,
        tensors,
        optimizer=lambda named: AdamW([p for _, p in named if p.requires_grad], lr=1e-4),
        comm=rt.DistributedComm(made.mesh, rt.required_groups(made)),
    )
    for _ in range(3):
        one.step(given)
    return allocated(one, given)


WIDE = 128


def sizes(name: str, graph: Graph, frozen: str) -> tuple[int, int]:
    """The most that a step holds beside what there is before it, as predicted and as measured."""
    plan = dict(plans(graph))[name]
    pcg = lower(graph, plan)
    (process,) = simulate(pcg, load_cluster(CLUSTER), plan, Planned("adamw", 2)).processes
    made = compile_pcg(pcg, "memory").program
    tensors = parameters_of(model(frozen, WIDE, 1), graph)
    found = fork_ranks(4, measured, made, tensors, batch(WIDE))
    return process.memory.peak - sum(process.base), found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["data", "zero1", "zero3"])
def test_memory_has_no_copies_and_is_as_predicted(name: str) -> None:
    plain = model("", WIDE, 1)
    apart = sizes(name, capture(plain, batch(WIDE)), "")
    found = sizes(name, merged("", WIDE, 1), "")
    copies = sum(p.nbytes for n, p in plain.named_parameters() if n[9] in "qkvgu")
    # Buffers that were there before are not measured.
    predicted, seen = (one - other for one, other in zip(found, apart, strict=True))
    assert abs(predicted - seen) < 0.05 * copies
    assert seen < 0.1 * copies


def test_copies_are_as_predicted() -> None:
    """Where one weight of three is frozen, all three are copied, which stays."""
    frozen = "blocks.1.k.weight"
    apart = sizes("data", capture(model(frozen, WIDE, 1), batch(WIDE)), frozen)
    found, copied = (sizes("data", merged(name, WIDE, 1), name) for name in ("", frozen))
    for said, seen in (apart, found, copied):
        assert said == pytest.approx(seen, rel=0.05)
    assert copied[1] - found[1] > 0.9 * 3 * WIDE * WIDE * 8


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_pipelines_train_alike(schedule: str) -> None:
    """Each stage lays its own weights; gradients of weights may be made apart."""
    apart = lowered.model("llama")
    graph = rewritten(apart.graph, tuple(map(str, merges(apart.graph))))
    items = stage_items(graph)
    middle = len(items) // 2
    plan = staged.drawn(
        graph, [items[:middle], items[middle:]], [2, 2], schedule=schedule, num_microbatches=2
    )
    assert any(pcg.adjacent for pcg in lower_stages(graph, plan).pcgs)
    report = staged.report(replace(apart, graph=graph), plan, staged.reference("llama"))
    assert report.passed, str(report)


def test_the_second_half_makes_the_gradients_of_joined_weights() -> None:
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    weights = tuple(torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in "ab")
    one, other = rt.linears(x, weights)
    made = (one.tanh() * other).sum()
    expected = torch.autograd.grad(made, (x, *weights), retain_graph=True)
    halves = SplitBackward([get_gradient_edge(made)], [x])
    with Allocations() as between:
        (gradient,) = halves.inputs([torch.ones_like(made)])
    assert weights[0].grad is None
    assert gradient is not None
    assert between.held < sum(w.nbytes for w in weights) + gradient.nbytes
    halves.weights()
    torch.testing.assert_close(gradient, expected[0])
    for weight, own in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(weight.grad, own)
