"""Which operators run as one kernel, and what they then leave out."""

from dataclasses import replace

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels
from parloom.cost.merging import merged
from parloom.cost.software import ELEMENTWISE, GENERATIONS, ROWS, Software
from parloom.cost.step import priced
from parloom.cost.works import Work
from parloom.errors import InputError
from parloom.ir.lower import lower
from parloom.ir.pcg import PCG, Compute
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph

TEXT = """\
graph "Chain" training=True

input x: float32[64, 256] = batch("x")
input target: float32[64, 256] = batch("target")
input gain: float32[256] = parameter("gain", trainable=True)
input weight: float32[256, 256] = parameter("weight", trainable=True)

main main:
    scaled: float32[64, 256] = mul(x, gain)  #
    active: float32[64, 256] = gelu(scaled)  #
    squared: float32[64, 256] = square(active)  #
    power: float32[64, 1] = mean(squared, (-1,), True)  #
    norm: float32[64, 1] = rsqrt(power)  #
    normed: float32[64, 256] = mul(active, norm)  # "" #1
    out: float32[64, 256] = linear(normed, weight)  #
    skip: float32[64, 256] = add(active, out)  #
    last: float32[64, 256] = tanh(skip)  #
    loss: float32[] = mse_loss(last, target)  #
    return loss

loss loss
"""
BARE = Software("bare", launch_s=0.0)


def lowered() -> PCG:
    return lower(parse_graph(TEXT), Decisions())


def kernels_of(merges: str) -> dict[str, bool]:
    """Result -> whether its operator begins a kernel, of those merged with others."""
    body = lowered().main.body
    found = merged(body, (), merges)
    items = {i: item for i, item in enumerate(body) if isinstance(item, Compute)}
    return {items[i].results[0].name: part.launches for i, part in found.items()}


def test_elementwise_chains_end_at_reductions_and_products() -> None:
    assert kernels_of(ELEMENTWISE) == {
        "scaled": True, "active": False, "squared": False,  # a chain
        "skip": True, "last": False,  # behind the product
        "norm": True, "normed": False,  # behind the mean
    }  # fmt: skip


def test_rows_merge_up_to_the_product() -> None:
    names = kernels_of(ROWS)
    before = {"scaled", "active", "squared", "power", "norm", "normed"}
    assert {name for name, launches in names.items() if launches} == {"scaled", "skip"}
    assert before | {"skip", "last"} == names.keys()
    assert kernels_of("") == {}


def test_what_is_read_behind_the_product_leaves_the_kernel() -> None:
    body = lowered().main.body
    found = merged(body, (), ROWS)
    parts = {body[i].results[0].name: p for i, p in found.items()}  # type: ignore[union-attr]
    assert parts["active"].inner_results == frozenset()  # the skip reads it
    assert parts["squared"].inner_results == {0}
    assert parts["normed"].inner_operands == {0, 1}
    assert parts["normed"].inner_results == frozenset()


@pytest.mark.parametrize("backward", [False, True])
def test_each_step_of_merging_takes_less_time(backward: bool) -> None:
    cluster = load_cluster("1xA100")
    times = []
    for merges in ("", ELEMENTWISE, ROWS):
        kernels = Kernels(cluster.device, replace(BARE, merges=merges))
        walked = priced(lowered(), cluster, Decisions(), kernels=kernels).main
        track = walked.backward if backward else walked.forward
        times.append(track.total.price.compute_s)
    assert times[0] > times[1] > times[2] > 0


def test_bytes_of_a_merged_chain_by_hand() -> None:
    """x and gain are read; what the skip and the product read is written."""
    cluster = load_cluster("1xA100")
    kernels = Kernels(cluster.device, replace(BARE, merges=ROWS))
    walked = priced(lowered(), cluster, Decisions(), kernels=kernels).main
    kinds = ("mul", "gelu", "square", "mean", "rsqrt")
    works = [w for w in walked.forward.works if isinstance(w, Work) and w.kind in kinds]
    chain = sum(w.compute_s for w in works)
    rows = 64 * 256 * 4
    rate = cluster.device.memory_bytes_per_s * cluster.device.efficiency.memory
    assert chain == pytest.approx((3 * rows + 256 * 4) / rate)


def test_generations_differ_in_what_a_step_takes() -> None:
    cluster = load_cluster("1xA100")
    seconds = {}
    for name, software in GENERATIONS.items():
        kernels = Kernels(cluster.device, software)
        found = priced(lowered(), cluster, Decisions(), kernels=kernels).main
        seconds[name] = found.forward.total.seconds + found.backward.total.seconds
    assert seconds["eager"] > seconds["fused"] > seconds["compiled"]
    with pytest.raises(InputError, match="merges 'all'"):
        Software("wrong", merges="all")
