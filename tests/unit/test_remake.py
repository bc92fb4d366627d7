"""Recomputation by value, below the search: what is dropped, what makes it again, what it costs."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.codegen.source import generate
from parloom.comparators.baselines import random_plan
from parloom.cost.clusters import load_cluster
from parloom.cost.ledger import AGAIN, COMPUTING, ledger
from parloom.cost.shares import runs, shares
from parloom.cost.simulate import simulate
from parloom.cost.step import priced
from parloom.cost.tasks import ACTIVATIONS, RECOMPUTATION
from parloom.cost.works import Walked, Work
from parloom.errors import VerifyError
from parloom.ir.factors import factorize
from parloom.ir.graph import Node, without_gradients
from parloom.ir.lower import lower
from parloom.ir.mesh import grid
from parloom.ir.pcg import PCG, Movement, Remake, results_of
from parloom.ir.plan import ActivationDecision, Decisions, NodeDecision, one_stage
from parloom.ir.text import parse_graph
from parloom.ir.verify import verify_decisions, verify_pcg

BLOCKS = """\
graph "Blocks" training=True

input x: float32[8, 16] = batch("x")
input scale: float32[16] = parameter("scale", trainable=True)
input up_0: float32[64, 16] = parameter("0.up", trainable=True)
input down_0: float32[16, 64] = parameter("0.down", trainable=True)
input up_1: float32[64, 16] = parameter("1.up", trainable=True)
input down_1: float32[16, 64] = parameter("1.down", trainable=True)

def block(
    hidden: float32[8, 16],
    up: float32[64, 16],
    down: float32[16, 64],
):
    same: float32[8, 16] = view(hidden, (8, 16))
    norm: float32[8, 16] = softmax(same, -1)  # norm
    wide: float32[8, 64] = linear(norm, up)  # up
    flat: float32[8, 64] = view(wide, (8, 64))  # up
    active: float32[8, 64] = gelu(flat)  # act
    out: float32[8, 16] = linear(active, down)  # down
    sum: float32[8, 16] = add(hidden, out)
    shown: float32[8, 16] = relu(sum)  # relu
    return sum, shown

main main:
    first: float32[8, 16] = mul(x, scale)
    a: float32[8, 16], b: float32[8, 16] = block["0"](first, up_0, down_0)
    c: float32[8, 16] = mul(a, b)  # between
    d: float32[8, 16], e: float32[8, 16] = block["1"](c, up_1, down_1)
    f: float32[8, 16] = add(d, e)
    loss: float32[] = sum(f)
    return loss

loss loss
"""
GRAPH = parse_graph(BLOCKS)
CLUSTER = load_cluster("4xcpu")
KEYS = tuple(item.key for item in GRAPH.by_name["block"].body if isinstance(item, Node))
NARROW, WIDE = 8 * 16 * 4, 8 * 64 * 4


def lowered(
    values: tuple[str, ...], moves: tuple[str, ...] = (), plan: Decisions | None = None
) -> PCG:
    """Both blocks with these lists."""
    both = tuple(ActivationDecision(p, "recompute", values, moves) for p in ("0", "1"))
    plan = replace(plan or Decisions(), activations=both)
    verify_decisions(GRAPH, plan)
    return verify_pcg(lower(GRAPH, plan))


def remade(pcg: PCG) -> Remake:
    (function,) = pcg.functions
    assert function.remake is not None
    return function.remake


def names(remake: Remake) -> tuple[set[str], set[str], set[str]]:
    """What is read, what is done again, and what comes out."""
    made = {v.name for item in remake.body for v in results_of(item)}
    return {v.name for v in remake.inputs}, made, {v.name for v in remake.outputs}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("act:gelu#0",), ({"flat"}, {"active"}, {"active"})),
        # The view goes with its memory, and is made again with it.
        (("up:linear#0",), ({"norm", "up"}, {"wide", "flat"}, {"flat"})),
        (("norm:softmax#0", "up:linear#0"),
         ({"same", "up"}, {"norm", "wide", "flat"}, {"norm", "flat"})),
        # What is listed and needed by nothing is not made again: neither is kept.
        (("act:gelu#0", "down:linear#0", ":add#0"), ({"flat"}, {"active"}, {"active"})),
    ],
)  # fmt: skip
def test_what_is_made_again(values: tuple[str, ...], expected: tuple[set[str], ...]) -> None:
    assert names(remade(lowered(values))) == expected


@pytest.mark.parametrize("values", [(":view#0",), ("up:view#0",), (":add#0",), ("relu:relu#0",)])
def test_memory_is_dropped_and_not_names(values: tuple[str, ...]) -> None:
    """Views of what is kept, and what the caller has, drop nothing: there is one function."""
    pcg = lowered(values)
    assert [function.remake for function in pcg.functions] == [None]
    assert pcg.functions == lower(GRAPH, Decisions()).functions


def test_an_evaluation_program_drops_nothing() -> None:
    """It has the decisions of training, about operators that it may not have."""
    activations = (ActivationDecision("0", "recompute", (*KEYS, "drop:dropout#0"), ("hidden",)),)
    pcg = lower(without_gradients(GRAPH), Decisions(activations=activations))
    assert [function.remake for function in pcg.functions] == [None]


def test_equal_lists_share_functions() -> None:
    lists = (("act:gelu#0",), ("act:gelu#0", ":add#0"))  # with equal effects
    activations = tuple(
        ActivationDecision(prefix, "recompute", values)
        for prefix, values in zip("01", lists, strict=True)
    )
    pcg = lower(GRAPH, Decisions(activations=activations))
    assert [function.name for function in pcg.functions] == ["block"]
    source = generate(pcg, "test")
    assert source.count("def block_again(") == 1
    assert source.count("again=block_again)") == 2
    one = lower(GRAPH, Decisions(activations=activations[:1]))
    assert [bool(function.remake) for function in one.functions] == [True, False]
    assert generate(one, "test").count("again=") == 1


SPLIT = Decisions(
    one_stage(grid({"x": 4})),
    tuple(
        NodeDecision(f"{prefix}{key}", ((factor, ("x",)),))
        for prefix in "01"
        for key, factor in ((".norm:softmax#0", "d0"), (".up:linear#0", "n"))
    ),
)


def test_moves_alone_are_made_again() -> None:
    """Rows of the norm lie apart and are gathered for the product of sharded columns."""
    remake = remade(lowered((), ("norm:softmax#0",), SPLIT))
    (gather,) = (item for item in remake.body if isinstance(item, Movement))
    assert gather.step.row.startswith("combine")
    assert all(isinstance(item, Movement) for item in remake.body)
    assert {v.name for v in remake.inputs} == {"norm"}
    whole = remade(lowered(("norm:softmax#0",), (), SPLIT))
    assert {item.node.key for item in whole.body if not isinstance(item, Movement)} == {  # type: ignore[union-attr]
        "norm:softmax#0"
    }


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (ActivationDecision("0", "recompute", ("up:linaer#0",)), r"0: no operator 'up:linaer#0' in"
         r" the block to recompute; did you mean 'up:linear#0'"),
        (ActivationDecision("0", "recompute", (), ("hiden",)), r"input 'hiden'.*mean 'hidden'"),
        (ActivationDecision("0", "recompute", ("hidden",)), r"no operator 'hidden' in the block"),
        (ActivationDecision("0", "keep", (":add#0",)), r"lists of values go with recompute, not"),
        (ActivationDecision("up", "recompute", (":add#0",)), r"no block 'up' in the model"),
    ],
)  # fmt: skip
def test_lists_that_say_nothing_are_refused(decision: ActivationDecision, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_decisions(GRAPH, Decisions(activations=(decision,)))
    with pytest.raises(VerifyError, match="'a' is decided twice in the values of the recomp"):
        ActivationDecision("0", "recompute", ("a", "a"))


def block_of(pcg: PCG) -> Walked:
    found = priced(pcg, CLUSTER, pcg.decisions)
    (function,) = pcg.functions
    return found.walker.call(function.name)


@pytest.mark.parametrize(
    ("values", "dropped", "extra"),
    [
        (("act:gelu#0",), WIDE, 0),
        (("up:linear#0",), WIDE, 0),
        (("norm:softmax#0",), NARROW, NARROW),  # of the block's input, which nobody else keeps
        (("up:linear#0", "act:gelu#0"), 2 * WIDE, 0),
    ],
)
def test_bytes_that_are_kept(values: tuple[str, ...], dropped: int, extra: int) -> None:
    kept, block = block_of(lower(GRAPH, Decisions())), block_of(lowered(values))
    assert block.inside_bytes == kept.inside_bytes - dropped
    assert block.forward.net_bytes == kept.forward.net_bytes - dropped
    assert block.forward.peak_bytes <= kept.forward.peak_bytes + dropped
    assert (0 in block.kept_inputs) == bool(extra)
    again = [w for w in block.backward.works if isinstance(w, Work) and w.again]
    assert {work.name for work in again} == set(values)
    assert block.backward.total.price.compute_s == pytest.approx(
        kept.backward.total.price.compute_s + sum(work.compute_s for work in again)
    )


def test_what_is_made_again_comes_before_the_first_that_needs_it() -> None:
    works = block_of(lowered(("act:gelu#0",))).backward.works
    order = [(w.name, w.again) for w in works if isinstance(w, Work)]
    made = order.index(("act:gelu#0", True))
    assert order[made - 1 : made + 2] == [
        (":add#0", False), ("act:gelu#0", True), ("down:linear#0", False),
    ]  # fmt: skip
    both = block_of(lowered(("act:gelu#0", "norm:softmax#0"))).backward.works
    again = [i for i, w in enumerate(both) if isinstance(w, Work) and w.again]
    assert again == [made, made + 1]


@pytest.mark.slow
@given(st.integers(0, 10**6))
def test_random_lists_lose_no_memory(seed: int) -> None:
    rng = Random(seed)
    values = tuple(key for key in KEYS if rng.random() < 0.5)
    moves = tuple(key for key in ("hidden", "up", *KEYS) if rng.random() < 0.5)
    plan = random_plan(GRAPH, factorize(GRAPH), grid({"x": 2, "y": 2}), seed)
    pcg = lowered(values, moves, plan)
    main = priced(pcg, CLUSTER, pcg.decisions).main
    assert main.forward.net_bytes + main.backward.net_bytes == 0
    assert main.forward.net_bytes <= main.forward.peak_bytes
    timeline = simulate(pcg, CLUSTER, pcg.decisions)
    assert timeline.bound_ps <= timeline.step_ps
    assert timeline.processes[0].memory.net[ACTIVATIONS] == 0
    assert timeline.processes[0].memory.net[RECOMPUTATION] == 0


def test_the_ledger_and_the_shares_know_what_is_done_twice() -> None:
    pcg = lowered(("act:gelu#0", "norm:softmax#0"))
    timeline = simulate(pcg, CLUSTER, pcg.decisions)
    spent = ledger(timeline, pcg, CLUSTER).by_cause()
    again = sum(ps for cause, ps in spent.items() if cause.what == AGAIN)
    walker = priced(pcg, CLUSTER, pcg.decisions).walker
    (function,) = pcg.functions
    found, counts = shares(pcg, walker), runs(pcg)
    items = found[function.name]
    assert {share.key for share in items if share.again} == {"act:gelu#0", "norm:softmax#0"}
    assert again == sum(2 * share.forward_ps for share in items if share.again) > 0
    every = sum(counts[name].ps(share) for name, listed in found.items() for share in listed)
    computed = sum(ps for cause, ps in spent.items() if cause.what in (AGAIN, COMPUTING))
    assert every == computed
