"""Prices of single operators, against sums done by hand."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parloom.cost.attention import KERNELS, NAMES, SCORES, attention_kernel
from parloom.cost.clusters import load_cluster
from parloom.cost.devices import find_device
from parloom.cost.kernels import (
    MEASURED,
    ROW,
    TILE_ENDS,
    Blocks,
    Kernels,
    LocalOperator,
    Scores,
    Seconds,
    batch_of,
    slowest,
)
from parloom.cost.software import GENERATIONS, Software
from parloom.errors import InputError
from parloom.ir.graph import TensorSpec
from parloom.ir.mesh import Device, Efficiency

DEVICE = Device(
    "test", (("bfloat16", 100e12), ("float32", 10e12)), 1 << 30, 1e12, None,
    Efficiency(0.5, 0.5, 0.3, 1.0),
)  # fmt: skip
BARE = Software("bare", clips=False, launch_s=0.0)


def bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def linear(m: int, k: int, n: int, wanted: tuple[int, ...] = (0, 1)) -> LocalOperator:
    return LocalOperator(
        "linear", (bf16(m, k), bf16(n, k)), (bf16(m, n),), flops=2.0 * m * n * k, wanted=wanted
    )


def attention(rows: int, causal: bool = True) -> LocalOperator:
    q = bf16(2, 8, rows, 64)
    return LocalOperator(
        "scaled_dot_product_attention", (q, q, q), (q,),
        blocks=Blocks(0, 1) if causal else Blocks(),
        flops=4.0 * 16 * rows * rows * 64, backward_ratio=2.5, wanted=(0, 1, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [((6, 4, 8), (8, 16), "mm"), ((6, 4, 8), (6, 8, 16), "bmm"), ((4, 8), (8, 16), "mm"),
     ((2, 3, 4, 8), (8, 16), "mm"), ((2, 3, 4, 8), (2, 3, 8, 16), "bmm")],
)  # fmt: skip
def test_rows_by_a_matrix_are_one_product(
    first: tuple[int, ...], second: tuple[int, ...], runs: str
) -> None:
    """As torch runs them where both have gradients."""
    one, other = (torch.randn(s, requires_grad=True) for s in (first, second))
    with Ran() as ran:
        result = torch.matmul(one, other)
    assert {"mm", "bmm"} & ran.ops == {runs}
    batch = batch_of("matmul", [first, second], tuple(result.shape))
    assert (batch > 1) == (runs == "bmm")
    if runs == "mm":
        weight, rows = bf16(*reversed(second)), math.prod(first[:-1])
        product = linear(rows, first[-1], second[-1])
        same = replace(product, op="linear", operands=(bf16(*first), weight))
        folded = replace(
            product, op="matmul", operands=(bf16(*first), bf16(*second)),
            results=(bf16(*result.shape),),
        )  # fmt: skip
        kernels = Kernels(DEVICE, BARE)
        assert kernels.seconds(folded) == kernels.seconds(
            replace(same, results=(bf16(*result.shape),))
        )


class Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_roofline_takes_the_slower_of_both() -> None:
    kernels = Kernels(DEVICE, BARE)
    large = kernels.seconds(linear(4096, 4096, 4096))
    assert large.forward_s == pytest.approx(2 * 4096**3 / 50e12)
    assert large.backward_s == pytest.approx(2 * large.forward_s)
    assert large.weights_s == pytest.approx(large.forward_s)
    thin = kernels.seconds(linear(1, 4096, 4096))
    assert thin.forward_s == pytest.approx((4096 + 4096 * 4096 + 4096) * 2 / 0.5e12)


def test_gradients_that_nobody_wants_cost_nothing() -> None:
    kernels = Kernels(DEVICE, BARE)
    frozen = kernels.seconds(linear(512, 512, 512, wanted=(0,)))
    assert frozen.weights_s == 0
    assert frozen.backward_s == pytest.approx(frozen.forward_s)
    assert kernels.seconds(linear(512, 512, 512, wanted=())).backward_s == 0


def test_every_kernel_is_launched() -> None:
    slow = Kernels(DEVICE, replace(BARE, launch_s=1e-3))
    fast = Kernels(DEVICE, BARE)
    one, other = slow.seconds(linear(8, 8, 8)), fast.seconds(linear(8, 8, 8))
    assert one.forward_s - other.forward_s == pytest.approx(1e-3)
    assert one.backward_s - other.backward_s == pytest.approx(2e-3)


def test_tiles_and_waves() -> None:
    tiled = Kernels(replace(DEVICE, cores=100), BARE)
    full = 10 * 256 * 10 * 128  # as many tiles as cores: one wave
    exact = tiled.product_s(2560, 1280, 1 << 20, "bfloat16")
    assert exact == pytest.approx(2 * full * (1 << 20) / 50e12, rel=1e-3)
    over = tiled.product_s(2561, 1280, 1 << 20, "bfloat16")
    assert over > 1.2 * exact  # one more row is another wave
    small = tiled.product_s(2560, 1280, 128, "bfloat16")
    assert small == pytest.approx(2 * exact * 128 / (1 << 20), rel=1e-3)


def test_rows_that_are_not_aligned_miss_the_matrix_units() -> None:
    kernels = Kernels(replace(DEVICE, cores=1), BARE)
    aligned = kernels.product_s(1024, 1024, 1024, "bfloat16")
    assert kernels.product_s(1024, 1024, 1028, "bfloat16") > 5 * aligned
    assert kernels.product_s(1028, 1024, 1024, "bfloat16") < 1.3 * aligned
    # As slow as on vector units, and slow at the ends of tiles, too.
    assert kernels.product_s(1024, 1024, 1028, "bfloat16") == pytest.approx(
        kernels.product_s(1024, 1024, 1028 + TILE_ENDS, "float32"), rel=0.02
    )


def test_the_ends_of_tiles_take_as_long_at_every_rate() -> None:
    kernels = Kernels(replace(DEVICE, cores=1), BARE)

    def ends_s(dtype: str) -> float:
        once, twice = (kernels.product_s(1024, 1024, k, dtype) for k in (1024, 2048))
        return 2 * once - twice

    assert ends_s("bfloat16") == pytest.approx(kernels.product_s(1024, 1024, 1024, "bfloat16") / 9)
    assert ends_s("float32") == pytest.approx(ends_s("bfloat16"))


def test_a_lookup_reads_the_rows_that_it_returns() -> None:
    kernels = Kernels(DEVICE, BARE)
    indices = TensorSpec((64,), "int64")
    rows = bf16(64, 512)

    def seconds(table_rows: int) -> float:
        operands = bf16(table_rows, 512), indices
        return kernels.seconds(LocalOperator("embedding", operands, (rows,))).forward_s

    assert seconds(1 << 20) == seconds(64) == pytest.approx((2 * 2 * 64 * 512 + 8 * 64) / 0.5e12)
    assert seconds(16) < seconds(64)  # no more than there is


def test_a_slow_device_is_slow_in_all_that_it_does() -> None:
    mean, slow = Kernels(DEVICE, BARE), Kernels(DEVICE, BARE, pace=1.5)
    assert slow.stream_s(1e9) == pytest.approx(1.5 * mean.stream_s(1e9))
    assert slow.update_s(1e9, 2) == pytest.approx(1.5 * mean.update_s(1e9, 2))
    assert slow.seconds(LocalOperator("relu", (bf16(64, 64),), (bf16(64, 64),))).forward_s == (
        pytest.approx(1.5 * mean.stream_s(4 * 64 * 64))
    )


def test_a_clock_slows_products_and_attention_but_not_memory() -> None:
    slow = replace(DEVICE, efficiency=replace(DEVICE.efficiency, clock=0.5))
    q = bf16(8, 16, 1024, 64)
    attention = LocalOperator("scaled_dot_product_attention", (q, q, q), (q,), flops=1e12)
    for operator, ratio in ((attention, 2.0), (LocalOperator("relu", (q,), (q,)), 1.0)):
        fast_s, slow_s = (Kernels(d, BARE).seconds(operator).forward_s for d in (DEVICE, slow))
        assert slow_s == pytest.approx(ratio * fast_s)
    fast_s, slow_s = (
        Kernels(d, BARE).product_s(1024, 1024, 1024, "bfloat16") for d in (DEVICE, slow)
    )
    assert slow_s == pytest.approx(2 * fast_s)


def test_one_attention_kernel_skips_what_is_masked_and_keeps_scores_on_the_chip() -> None:
    flash = Kernels(DEVICE, BARE)
    through_memory = Kernels(DEVICE, replace(BARE, attention=SCORES))
    long = 1 << 16
    masked, whole = (flash.seconds(attention(long, causal)) for causal in (True, False))
    assert masked.forward_s == pytest.approx(whole.forward_s / 2, rel=0.02)
    assert masked.backward_s == pytest.approx(masked.forward_s * 2.5 / 0.8)
    unfused = through_memory.seconds(attention(2048))
    assert unfused.forward_s > 2 * flash.seconds(attention(2048)).forward_s
    assert unfused == through_memory.seconds(attention(2048, causal=False))


def test_rates_of_attention_are_those_that_were_published() -> None:
    """FlashAttention-2 on A100: 204 and 168 TFLOP/s with 4,096 keys and heads of 128, causal."""
    device = find_device("A100-80GB").device
    kernels = Kernels(device, BARE)
    q = bf16(2, 16, 4096, 128)
    flops = 4.0 * 32 * 4096 * 4096 * 128
    operator = replace(attention(1), operands=(q, q, q), results=(q,), flops=flops)
    found = kernels.seconds(operator)
    assert flops / 2 / found.forward_s == pytest.approx(204e12, rel=0.1)
    assert 2.5 * flops / 2 / found.backward_s == pytest.approx(168e12, rel=0.1)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("device", ["V100", "A100", "H100", "B200", "TPU-v4", "cpu"])
def test_kernels_of_attention(name: str, device: str) -> None:
    """More keys and wider heads do not slow a kernel down; no two widths are alike."""
    kernel = attention_kernel(name, find_device(device).device)

    def share(keys: int, width: int) -> float:
        return kernel.share(keys, width, causal=True, backward=False)

    assert 0 < share(512, 64) < share(4096, 64) <= share(4096, 128) < 1
    assert kernel.share(4096, 128, causal=False, backward=False) > share(4096, 128)
    seconds = [width / share(4096, width) for width in (32, 64, 72, 80, 96, 112, 128, 160)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(seconds))
    assert share(4096, 80) < share(4096, 96)  # heads of 80 run as those of 96


def test_a_device_has_the_newest_kernel_that_is_written_for_it() -> None:
    v100, a100, h100 = (find_device(name).device for name in ("V100", "A100", "H100"))
    assert attention_kernel("flash3", a100) == KERNELS["flash2", "ampere"]
    assert attention_kernel("flash3", h100) == KERNELS["flash3", "hopper"]
    assert attention_kernel("cudnn", v100) == KERNELS["efficient", "volta"]


def test_dropout_of_probabilities_goes_through_memory() -> None:
    kernels = Kernels(DEVICE, replace(BARE, attention=SCORES))
    plain, dropped = (replace(attention(512), dropout=dropout) for dropout in (False, True))
    scores = 2 * 8 * 512 * 512
    more = kernels.seconds(dropped).forward_s - kernels.seconds(plain).forward_s
    assert more == pytest.approx(5 * scores / 0.5e12)
    found = kernels.score_bytes(dropped)
    assert found is not None
    assert found.kept_bytes == 5 * scores
    assert Kernels(DEVICE, BARE).seconds(dropped) == Kernels(DEVICE, BARE).seconds(plain)


def test_the_slowest_of_many_devices_sets_the_pace() -> None:
    paces = [slowest(load_cluster(f"{n}x8xA100-80GB")) for n in (1, 16, 256)]
    assert slowest(load_cluster("1xA100-80GB")) == 1.0
    assert 1.02 < paces[0] < paces[1] < paces[2] < 1.08
    assert slowest(load_cluster("4xcpu")) == 1.0
    plain, paced = (Kernels(DEVICE, BARE, pace=pace) for pace in (1.0, 1.5))
    product = linear(512, 512, 512)
    assert paced.seconds(product).backward_s == 1.5 * plain.seconds(product).backward_s


def test_long_runs_keep_a_part_of_the_rate_of_products() -> None:
    device = replace(DEVICE, efficiency=Efficiency(0.5, 0.5, 0.3, 0.8))
    product = linear(4096, 4096, 4096)
    found = Kernels(device, BARE).seconds(product).forward_s
    assert found == pytest.approx(Kernels(DEVICE, BARE).seconds(product).forward_s / 0.8)


def test_scores_take_memory_where_attention_is_not_one_kernel() -> None:
    scores = 2 * 8 * 512 * 512 * 2  # samples, heads, rows, keys, bytes
    megatron = GENERATIONS["megatron"]
    keeps = Kernels(DEVICE, megatron).score_bytes(attention(512))
    assert keeps == Scores(scores, scores, 2 * scores)
    again = Kernels(DEVICE, replace(megatron, keeps_scores=False)).score_bytes(attention(512))
    assert again == Scores(2 * scores, 0, 3 * scores)
    assert Kernels(DEVICE, GENERATIONS["fused"]).score_bytes(attention(512)) is None
    assert Kernels(DEVICE, megatron).score_bytes(linear(8, 8, 8)) is None


def test_sums_have_no_backward_kernel() -> None:
    kernels = Kernels(DEVICE, BARE)
    x = bf16(1024, 1024)
    both = LocalOperator("add", (x, x), (x,), flops=1.0, wanted=(0, 1))
    assert kernels.seconds(both) == Seconds(3 * x.num_bytes / 0.5e12)
    wide = LocalOperator("add", (x, bf16(1024)), (x,), flops=1.0, wanted=(0, 1))
    assert kernels.seconds(wide).backward_s == pytest.approx((x.num_bytes + 2048) / 0.5e12)
    product = replace(both, op="mul", kept_operands=(0, 1))
    assert kernels.seconds(product).backward_s == pytest.approx(5 * x.num_bytes / 0.5e12)


def test_merged_operators_leave_out_what_stays_inside() -> None:
    kernels = Kernels(DEVICE, replace(BARE, launch_s=1e-6))
    x = bf16(1024, 1024)
    gelu = LocalOperator("gelu", (x,), (x,), flops=1.0, wanted=(0,), kept_operands=(0,))
    alone = kernels.seconds(gelu)
    assert alone.forward_s == pytest.approx(2 * x.num_bytes / 0.5e12 + 1e-6)
    assert alone.backward_s == pytest.approx(3 * x.num_bytes / 0.5e12 + 1e-6)
    first = kernels.seconds(replace(gelu, inner_results=frozenset({0})))
    last = kernels.seconds(replace(gelu, inner_operands=frozenset({0}), launches=False))
    assert first.forward_s + last.forward_s == pytest.approx(alone.forward_s)
    middle = replace(
        gelu, inner_operands=frozenset({0}), inner_results=frozenset({0}), launches=False
    )
    assert kernels.seconds(middle).forward_s == 0


def test_a_measured_table_overrides_the_formulas() -> None:
    class Table:
        def seconds(self, operator: LocalOperator) -> Seconds | None:
            return Seconds(1.0, 2.0, 1.0, MEASURED) if operator.op == "linear" else None

    kernels = Kernels(DEVICE, BARE, Table())
    assert kernels.seconds(linear(8, 8, 8)) == Seconds(1.0, 2.0, 1.0, MEASURED)
    assert kernels.seconds(attention(64)) == Kernels(DEVICE, BARE).seconds(attention(64))


def test_update_in_one_pass_or_in_many() -> None:
    one = Kernels(DEVICE, replace(BARE, fused_optimizer=True)).update_s(4.0, 2)
    assert one == pytest.approx(7 * 4 / 0.5e12)
    assert Kernels(DEVICE, BARE).update_s(4.0, 2) == pytest.approx(3 * one)
    clipped = Kernels(DEVICE, replace(BARE, fused_optimizer=True, clips=True)).update_s(4.0, 2)
    assert clipped == pytest.approx(10 * 4 / 0.5e12)


def test_generations() -> None:
    assert len(GENERATIONS) == 9
    assert GENERATIONS["megatron"].overlaps is False
    with pytest.raises(InputError, match="flash2"):
        Software("odd", attention="flash22")


def test_a_cpu_has_no_tiles() -> None:
    device = load_cluster("4xcpu").device
    assert Kernels(device, BARE).product_s(3, 5, 7, "float32") == pytest.approx(210 / 160e9)


def test_linear_layers_in_eight_bits() -> None:
    device = replace(DEVICE, flops_per_s=(*DEVICE.flops_per_s, ("float8", 200e12)))
    wide = Kernels(device, BARE).seconds(linear(8192, 8192, 8192))
    narrow = Kernels(device, BARE, None, "float8").seconds(linear(8192, 8192, 8192))
    assert 0.5 * wide.forward_s < narrow.forward_s < 0.7 * wide.forward_s  # casts cost, too
    by_row = Kernels(device, BARE, None, "float8", scaling=ROW).seconds(linear(8192, 8192, 8192))
    assert narrow.forward_s < by_row.forward_s
    fuses = replace(BARE, fuses_casts=True)
    fused = Kernels(device, fuses, None, "float8").seconds(linear(8192, 8192, 8192))
    assert 0.5 * wide.forward_s < fused.forward_s < narrow.forward_s
    q = attention(64)
    assert Kernels(device, BARE, None, "float8").seconds(q) == Kernels(device, BARE).seconds(q)


def test_autocast_moves_twice_the_bytes_and_casts_operands() -> None:
    plain, cast = Kernels(DEVICE, BARE), Kernels(DEVICE, BARE, autocast=True)
    x = bf16(1024, 1024)
    gelu = LocalOperator("gelu", (x,), (x,), flops=1.0, wanted=(0,), kept_operands=(0,))
    assert cast.seconds(gelu).forward_s == pytest.approx(2 * plain.seconds(gelu).forward_s)
    product = linear(1024, 1024, 1024)
    more = cast.seconds(product).forward_s - plain.seconds(product).forward_s
    assert more == pytest.approx(3 * 2 * x.num_bytes / 0.5e12)
    wide = replace(gelu, operands=(TensorSpec((8, 8), "float32"),))
    assert cast.seconds(wide) == plain.seconds(wide)


def test_experts_have_tiles_of_their_own() -> None:
    """64 experts with 16 rows each do not fill tiles that one of 1,024 rows fills."""
    device = replace(DEVICE, cores=100)
    rows, out = bf16(1024, 512), bf16(1024, 256)

    def seconds(experts: int) -> float:
        operator = LocalOperator(
            "parloom.grouped_mm", (rows, bf16(experts, 512, 256)), (out,),
            flops=2.0 * 1024 * 512 * 256,
        )  # fmt: skip
        return Kernels(device, BARE).seconds(operator).forward_s

    assert seconds(64) > 2 * seconds(1)
