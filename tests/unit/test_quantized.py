"""Quantized communication in plans, in step programs, in prices and in the search."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parloom import api
from parloom.cost.clusters import load_cluster
from parloom.cost.quantized import Quantized
from parloom.cost.simulate import simulate
from parloom.errors import InputError, LayoutError, VerifyError
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, grid
from parloom.ir.plan import Decisions, Optimizer, ParameterDecision, Stage, Storage, one_stage
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.step_program import as_sent, step_program
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_decisions
from parloom.quantization import BLOCK, INT8, QUANTIZED, in_blocks, payload_bytes
from parloom.runtime import quantized as runtime
from parloom.search.meshes import logical_meshes
from parloom.search.quantized import in_int8 as all_in_int8
from parloom.search.stream_bound import least_step_ps
from tests.property.searched import ADAM, context_of, random_graph
from tests.property.test_streams import good_plans, random_plans
from tests.unit.graphs import stack
from tests.unit.step_price import price_plan
from tests.unit.test_plan_json import example
from tests.unit.test_step import NAMES, TEXT, WEIGHTS, data_parallel

GRAPH = parse_graph(TEXT)
WHOLE, DATA = Storage(), Storage(("data",))
STORED = {
    "replicated": (WHOLE, WHOLE, WHOLE),
    "zero1": (WHOLE, WHOLE, DATA),
    "zero2": (WHOLE, DATA, DATA),
    "zero3": (DATA, DATA, DATA),
}
# Bytes of int8 with a scale in float32 for each block.
EACH = 1 + 4 / BLOCK
FAST, SLOW = load_cluster("2x4xH100"), load_cluster("4x2xRTX4090")


def in_int8(decisions: Decisions, graph: Graph = GRAPH) -> Decisions:
    return all_in_int8(decisions, graph)


def sent_bytes(decisions: Decisions, cluster: Cluster, graph: Graph = GRAPH) -> float:
    """What a device sends in a step."""
    found = price_plan(lower(graph, decisions), cluster, decisions, Optimizer("adamw", 2))
    return sum(size for _, size, _ in found.price.comm)


def test_plan_files_say_it_and_others_stay_as_they_are() -> None:
    plain = example()
    assert "_sent" not in plan_to_json(plain)
    decisions = in_int8(plain.decisions, parse_graph(plain.graph))
    assert decisions.sent_dtypes == (INT8,)
    plan = replace(plain, decisions=decisions)
    text = plan_to_json(plan)
    assert plan_from_json(text, "p.json") == plan
    with pytest.raises(InputError, match=r"p.json:.*int8"):
        plan_from_json(text.replace('"int8"', '"int4"'), "p.json")


def test_pipelines_and_unknown_types_are_refused() -> None:
    decisions = data_parallel(load_cluster("4xcpu"))
    verify_decisions(GRAPH, in_int8(decisions))
    unknown = replace(decisions, parameters=(ParameterDecision(NAMES[0], gradient_sent="int4"),))
    with pytest.raises(VerifyError, match="'int4', to send in, is not one of int8"):
        verify_decisions(GRAPH, unknown)
    stages = (
        Stage(("net",), (range(1),), grid({})),
        Stage((":mse_loss#0",), (range(1, 2),), grid({})),
    )
    pipeline = Decisions(stages, num_microbatches=2, schedule="gpipe")
    verify_decisions(GRAPH, pipeline)
    with pytest.raises(VerifyError, match="not yet executable in pipelines"):
        verify_decisions(GRAPH, in_int8(pipeline))


@pytest.mark.parametrize("storage", STORED)
def test_what_is_reduced_once_and_what_is_gathered_in_passes_is_quantized(storage: str) -> None:
    decisions = in_int8(data_parallel(load_cluster("4xcpu"), *STORED[storage]))
    nodes = step_program(lower(GRAPH, decisions))
    found = {(node.action, node.when): node.dtype for node in nodes if node.parameters}
    want = {
        "replicated": {("REDUCE", "step"): INT8},
        "zero1": {("REDUCE", "step"): INT8, ("GATHER", "step"): ""},
        "zero2": {("REDUCE", "microbatch"): INT8, ("GATHER", "step"): ""},
        "zero3": {("GATHER", "forward and backward"): INT8, ("REDUCE", "microbatch"): INT8},
    }
    assert found == want[storage]


def test_a_gradient_of_two_collectives_is_sent_as_it_is() -> None:
    mesh = grid({"x": 2, "y": 2})
    plan = data_parallel(load_cluster("4xcpu"))
    nodes = tuple(replace(n, factors=(("d0", ("x", "y")),)) for n in plan.nodes)
    near = Storage(("y",))
    parameters = (ParameterDecision(NAMES[0], near, near, near),)
    decisions = in_int8(Decisions(one_stage(mesh), nodes, parameters))
    nodes_of = {
        (name.input.target, node.kind, node.axes): node.dtype
        for node in step_program(lower(GRAPH, decisions))
        for name in node.parameters
    }
    assert nodes_of == {
        (NAMES[0], "all_gather", ("y",)): INT8,
        (NAMES[0], "reduce_scatter", ("y",)): "",
        (NAMES[0], "all_reduce", ("x",)): "",
        (NAMES[1], "all_reduce", ("x", "y")): INT8,
    }


@pytest.mark.parametrize("cluster", ["4xcpu", "1x4xH100"])
def test_bytes_are_a_quarter(cluster: str) -> None:
    """By hand: an all_reduce is an all_to_all and an all_gather of a quarter of the bytes."""
    there = load_cluster(cluster)
    plain = data_parallel(there)
    assert sent_bytes(plain, there) == pytest.approx(1.5 * WEIGHTS, rel=1e-4)
    assert sent_bytes(in_int8(plain), there) == pytest.approx(1.5 * WEIGHTS / 4 * EACH, rel=1e-4)
    fsdp = data_parallel(there, *STORED["zero3"])
    sent = sent_bytes(in_int8(fsdp), there)
    # The only block stays gathered for its backward pass: an all_gather and an all_to_all.
    assert sent == pytest.approx(2 * 0.75 * WEIGHTS / 4 * EACH, rel=1e-4)
    assert sent_bytes(fsdp, there) >= 3.9 * sent


def test_weights_of_half_precision_send_half() -> None:
    there = load_cluster("1x4xH100")
    graph = parse_graph(TEXT.replace("float32", "bfloat16"))
    fsdp = data_parallel(there, *STORED["zero3"])
    exact, half = sent_bytes(fsdp, there, graph), sent_bytes(in_int8(fsdp, graph), there, graph)
    assert exact / half == pytest.approx(2 / EACH, rel=1e-4)


def test_steps_are_faster_where_links_are_slow_and_quantizing_takes_its_time() -> None:
    slow = load_cluster("4x1xcpu")
    for stored in STORED.values():
        plain = data_parallel(slow, *stored)
        played = [simulate(lower(GRAPH, own), slow, own, ADAM) for own in (plain, in_int8(plain))]
        assert played[1].step_ps < played[0].step_ps


@pytest.mark.parametrize("seed", range(4))
def test_no_quantized_plan_is_below_its_bound(seed: int) -> None:
    rng, cluster = Random(seed), (SLOW, FAST)[seed % 2]
    graph = random_graph(rng, num_operators=4)
    mesh = rng.choice(list(logical_meshes(cluster)))
    context = context_of(graph, cluster, mesh, quantizes=True)
    bound, tried = least_step_ps(context), 0
    plain = least_step_ps(context_of(graph, cluster, mesh))
    assert 0 < bound <= plain * (1 + 1e-9)
    drawn = tuple(random_plans(graph, mesh, 1, rng))
    for plan in (*good_plans(context), *drawn, *(in_int8(own, graph) for own in drawn)):
        try:
            pcg = lower(graph, plan)
        except LayoutError:
            continue
        tried += 1
        assert bound <= simulate(pcg, cluster, plan, ADAM).step_ps * (1 + 1e-9)
    assert tried > 2


def test_plans_say_what_the_search_sends_of_weights_that_are_whole() -> None:
    """A whole weight says nothing of chunks, and its gradient is sent in int8."""
    cluster, graph = load_cluster("4x1xcpu"), stack(2, batch=4096, width=512)
    (mesh,) = logical_meshes(cluster, 1)
    found = [
        (parameter.optimizer.axes, parameter.gradient_sent)
        for plan in good_plans(context_of(graph, cluster, mesh, quantizes=True))
        for parameter in plan.parameters
    ]
    assert ((), INT8) in found


def test_what_is_not_sent_so_is_not_said() -> None:
    """A gradient of two collectives, and one that no collective makes whole."""
    mesh = grid({"x": 2, "y": 2})
    plan = data_parallel(load_cluster("4xcpu"))
    nodes = tuple(replace(n, factors=(("d0", ("x", "y")),)) for n in plan.nodes)
    near = Storage(("y",))
    decisions = Decisions(one_stage(mesh), nodes, (ParameterDecision(NAMES[0], near, near, near),))
    found = {p.name: p for p in as_sent(lower(GRAPH, in_int8(decisions))).parameters}
    assert (found[NAMES[0]].weight_sent, found[NAMES[0]].gradient_sent) == (INT8, "")
    assert found[NAMES[1]].gradient_sent == INT8
    alone = in_int8(Decisions(one_stage(grid({}))))
    assert alone.sent_dtypes == (INT8,)
    assert not as_sent(lower(GRAPH, alone)).sent_dtypes


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Kernels that run, and bytes that they read and write; views and empty tensors are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ("empty", "empty_like", "new_empty"):
            return found
        read = [] if name == "new_zeros" else [x for x in args if isinstance(x, torch.Tensor)]
        self.num_bytes += sum(x.nbytes for x in (*read[name == "copy_" :], found))
        # It copies, and then fills the copy.
        self.launches += 2 if name == "masked_fill" else 1
        return found


class Counted:
    """Kernels that say what they stream: bytes, and launches."""

    def stream_s(self, num_bytes: int, launches: int) -> tuple[int, int]:
        return num_bytes, launches


class Sent:
    """A group whose messages are what was there before; `before` is what ran until the last."""

    size, index = 4, 0

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.before: list[tuple[int, int]] = []

    def all_to_all(self, *_: torch.Tensor) -> "Sent":
        self.before.append((self.streams.num_bytes, self.streams.launches))
        return self

    all_gather = all_to_all

    def wait(self) -> None:
        """It is there."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_kernels_are_those_that_the_runtime_runs(kind: str, dtype: torch.dtype) -> None:
    """Counted while it runs: launches exactly, bytes but for those of scales."""
    ranks, share = 4, 64 * BLOCK
    mine, rows = torch.ones(share, dtype=dtype), torch.ones(ranks, share, dtype=dtype)
    arguments = {"all_gather": (rows, mine), "reduce_scatter": (mine, rows)}
    with Streams() as streams:
        sent = Sent(streams)
        run = getattr(runtime.Quantized(sent), kind)  # type: ignore[arg-type]
        run(*arguments.get(kind, (rows.view(-1),))).wait()
    before, after = sent.before[0], (streams.num_bytes, streams.launches)
    prices = Quantized(None, Counted(), grid({"x": ranks}))  # type: ignore[arg-type]
    coding = prices.coding(kind, ("x",), ranks * share, dtype.itemsize)
    for found, there in (
        (coding.encode_s, before),
        (coding.decode_s, tuple(b - a for a, b in zip(before, after, strict=True))),
    ):
        num_bytes, launches = cast("tuple[int, int]", found)
        assert launches == there[1]
        assert num_bytes == pytest.approx(there[0], 0.02)


# Two devices on a slow link, and many samples: gradients are the least that is sent.
SLOW_LINK = """
name: slow
device: {name: fast, memory: 8GiB, memory_bandwidth: 500GB/s, rates: {fp32: 50GFLOP/s}}
backend: gloo
levels: [{name: network, size: 2, bandwidth: 50Mbit/s, latency: 200us}]
"""


def test_what_was_allowed_and_not_used_is_said(tmp_path: Path) -> None:
    """Links of a node are fast, and quantizing takes longer than it saves."""
    (tmp_path / "fast.yaml").write_text(SLOW_LINK.replace("50Mbit/s", "100GB/s"))
    program = api.capture("zoo:mlp", optimizer="sgd")
    asked = {"cluster": str(tmp_path / "fast.yaml"), "devices": 2, "method": "data_parallel"}
    plan = api.search(program, allow=(QUANTIZED,), **asked)  # type: ignore[arg-type]
    assert not plan.decisions.sent_dtypes
    assert "int8 was allowed, and no plan that was found is faster for it" in plan.notes
    assert not any(INT8 in note for note in api.search(program, **asked).notes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_search_uses_it_only_where_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(SLOW_LINK)
    program = api.capture("zoo:mlp", batch=8192, optimizer="sgd")
    rule, in_rule, best = (
        api.search(
            program, cluster=str(tmp_path / "slow.yaml"), devices=2, method=method, allow=allow
        )
        for method, allow in (
            ("data_parallel", ()),
            ("data_parallel", (QUANTIZED,)),
            ("auto", (QUANTIZED,)),
        )
    )
    dtypes = [plan.decisions.sent_dtypes for plan in (rule, in_rule, best)]
    assert dtypes == [(), (INT8,), (INT8,)]
    steps = [plan.prediction.step_s for plan in (rule, in_rule, best) if plan.prediction]
    assert steps[2] <= steps[1] < 0.8 * steps[0]
    exact = [own.step_s for own in best.alternatives if INT8 not in own.name]
    assert steps[2] < 0.8 * min(exact)
    assert best.bound_s is not None
    assert best.bound_s <= steps[2]
    with pytest.raises(InputError, match="known: quantized-communication"):
        api.plan("zoo:mlp", cluster="2x1xcpu", allow=["int8"])


def test_blocks() -> None:
    assert [in_blocks(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, BLOCK, BLOCK, 2 * BLOCK]
    assert payload_bytes(2 * BLOCK) == 2 * BLOCK + 8
