"""Calibrations: files are read strictly, and predictions follow what was measured."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.comparators.baselines import data_parallel
from parloom.cost.bands import KNOWN
from parloom.cost.calibration import (
    Calibration,
    Fingerprint,
    Product,
    Stream,
    Timed,
    TimedCollective,
    calibration_from_json,
    calibration_to_json,
    key_of,
    links_of,
)
from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import MEASURED, Kernels, LocalOperator
from parloom.cost.local_operators import local_operator
from parloom.cost.measured import (
    CALIBRATED,
    CPU_ERRORS,
    MOST_LOST,
    Table,
    calibrated,
    error_of,
    mismatches,
    source_of,
)
from parloom.cost.pipeline import send
from parloom.cost.simulate import simulate
from parloom.cost.tasks import COMPUTE, picoseconds
from parloom.cost.timeline import Timeline
from parloom.errors import InputError
from parloom.ir.graph import TensorSpec
from parloom.ir.lower import lower
from parloom.ir.ops.joined import LINEARS
from parloom.ir.pcg import Compute
from parloom.ir.plan import Decisions
from parloom.ir.regular_parts import Join
from tests.unit.graphs import perceptron
from tests.unit.test_simulate import chunked
from tests.unit.test_simulate import model as blocks

HERE = Fingerprint("cpu", "a processor", 2, "", "2.13.0", "gloo")
MADE = Calibration(
    HERE,
    4,
    2e-6,
    (Product("float32", 64, 64, 64, 1e-5), Product("float32", 512, 512, 512, 1e-3)),
    (Stream(1 << 16, 1e-5), Stream(1 << 24, 4e-3)),
    (),
    (
        TimedCollective("all_reduce", ((0, 4),), 1 << 10, 1e-3, 0.75),
        TimedCollective("all_reduce", ((0, 4),), 1 << 20, 3e-3, 0.25),
    ),
    0.05,
)
CLUSTER = load_cluster("4xcpu")


def document(**changes: Any) -> str:
    return json.dumps(json.loads(calibration_to_json(MADE)) | changes)


def test_a_file_reads_back() -> None:
    assert calibration_from_json(calibration_to_json(MADE), "here") == MADE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (document(launch_s=math.nan), "c.json: launch_s: .*finite number, got nan"),
        (document(launch_s=-1.0), "c.json: launch_s: .*from 1e-09 to 10 s, got -1.0"),
        (document(launch_s=0.0), "from 1e-09 to 10 s, got 0.0"),
        (document(launch_s=1e-300), "launch_s: .*from 1e-09 to 10 s, got 1e-300"),
        (document(launch_s=1e6), "launch_s: .*from 1e-09 to 10 s"),
        (document(error=math.inf), "finite number"),
        (document(error=1e308), r"error: .*from 0 to 10, got 1e\+308"),
        (document(error="wide"), "error: input should be a valid number, got 'wide'"),
        (
            document(products=[asdict(Product("float32", 1024, 1024, 1024, 1e-9))]),
            r"products\[0\]: 2.15e\+09 FLOP in 1e-09 s are .*devices do 1e\+06 to 1e\+18;",
        ),
        (
            document(streams=[{"num_bytes": 1 << 30, "seconds": 1e4}]),
            r"streams\[0\]: .* B in 10000 s are 1.1e\+05 B/s, and devices do 1e\+06 to 1e\+15",
        ),
        (document(products=[]), "products: .*at least 1"),
        (document(streams=[{"num_bytes": 1, "seconds": -3.0}]), r"streams\[0\].seconds"),
        (document(streams=[{"num_bytes": 1, "second": 3.0}]), r"seconds: field required"),
        (document(launch=1.0), "launch: unknown key.*launch_s"),
        (document(zzz=1.0), "zzz: unknown key; known: (?!.*seconds.*seconds)"),
        (document(parloom_calibration=1), "parloom_calibration: .*measure again"),
        (document(num_ranks=True), "num_ranks"),
        (
            document(collectives=[asdict(replace(MADE.collectives[0], lost=-0.5))]),
            r"collectives\[0\].lost: .*from 0 to 100, got -0.5",
        ),
        ("{", "c.json: the file"),
        ("[]", "c.json: the file"),
        ("", "c.json: the file"),
    ],
)
def test_what_is_no_calibration_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        calibration_from_json(text, "c.json")


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_any_other_text_is_refused(text: str | bytes) -> None:
    with pytest.raises(InputError):
        calibration_from_json(text, "c.json")


def operator(rows: int = 8) -> LocalOperator:
    x, w = TensorSpec((rows, 64), "float32"), TensorSpec((64, 64), "float32")
    flops = 2.0 * rows * 64 * 64
    return LocalOperator("linear", (x, w), (x,), flops=flops, wanted=(0, 1))


def test_a_measured_operator_overrides_the_formula() -> None:
    made = operator()
    timed = Timed(key_of(made), 0.25, 0.5)
    _, kernels = calibrated(CLUSTER, replace(MADE, operators=(timed,)))
    found = kernels.seconds(made)
    assert (found.forward_s, found.backward_s, found.source) == (0.25, 0.5, MEASURED)
    other = kernels.seconds(replace(made, op="mm"))
    assert other.source == CALIBRATED
    assert other.forward_s < 0.01
    assert key_of(made) != key_of(replace(made, wanted=(1,)))


def test_an_operator_takes_as_much_longer_as_it_is_larger_than_its_kin() -> None:
    """A part was measured; the whole is not priced by the formula, or splitting would never pay."""

    def index(rows: int, wanted: tuple[int, ...] = (0,)) -> LocalOperator:
        x = TensorSpec((rows, 64), "float32")
        return LocalOperator("index", (x,), (x,), wanted=wanted)

    launch, timed = MADE.launch_s, []
    for rows, seconds in ((8, 0.25), (512, 0.5)):
        timed.append(Timed(key_of(index(rows)), launch + seconds, launch / 2))
    _, kernels = calibrated(CLUSTER, replace(MADE, operators=tuple(timed)))
    found = kernels.seconds(index(4))
    assert found.forward_s == pytest.approx(launch + 0.25 / 2)
    assert found.backward_s == pytest.approx(launch / 2)
    assert found.source == CALIBRATED
    assert kernels.seconds(index(1024)).forward_s == pytest.approx(launch + 2 * 0.5)
    # Between two, linear in what it moves.
    for rows in (32, 256):
        share = (rows - 8) / (512 - 8)
        between = launch + 0.25 + share * 0.25
        assert kernels.seconds(index(rows)).forward_s == pytest.approx(between)
    assert kernels.seconds(index(32, ())).forward_s < 1e-3  # makes no gradient: not of its kind
    timed = [Timed(key_of(operator(rows=8)), launch + 0.25, launch + 0.5)]
    _, kernels = calibrated(CLUSTER, replace(MADE, operators=tuple(timed)))
    whole = kernels.seconds(operator(rows=32))  # a product, by its multiplications
    assert whole.forward_s == pytest.approx(launch + 4 * 0.25)
    assert whole.backward_s == pytest.approx(launch + 4 * 0.5)
    assert whole.weights_s == pytest.approx(whole.backward_s / 2)


def test_a_measured_merge_overrides_the_product_that_it_is() -> None:
    x, weight, out = (TensorSpec(shape, "float32") for shape in ((64, 64), (128, 64), (64, 128)))
    merged = LocalOperator(
        LINEARS, (x, weight), (out,), flops=2.0 * 64 * 128 * 64, wanted=(0, 1), kept_operands=(0, 1)
    )
    alone = replace(merged, op="linear")

    def forward_s(*timed: Timed) -> float:
        kernels = calibrated(CLUSTER, replace(MADE, operators=timed))[1]
        return kernels.seconds(merged).forward_s

    of_product = Timed(key_of(alone), 3e-4, 6e-4)
    copied_s = forward_s(of_product) - 3e-4
    assert copied_s == pytest.approx(2 * weight.num_bytes / ((1 << 24) / 4e-3) + MADE.launch_s)
    assert forward_s(of_product, Timed(key_of(merged), 7e-4, 8e-4)) == 7e-4
    # Merges of other shapes, or of weights in one memory, say nothing of what is copied here.
    wider = replace(merged, operands=(x, replace(weight, shape=(256, 64))))
    for other in (wider, replace(merged, in_place=True)):
        assert forward_s(of_product, Timed(key_of(other), 1.0, 1.0)) == 3e-4 + copied_s


def test_a_product_with_other_gradients_is_as_slow_as_its_kin() -> None:
    """A square product of as many multiplications is much faster than one of few rows."""
    thin, launch = operator(rows=8), MADE.launch_s
    timed = Timed(key_of(thin), launch + 0.25, launch + 0.6)
    _, kernels = calibrated(CLUSTER, replace(MADE, operators=(timed,)))
    found = kernels.seconds(replace(operator(rows=16), wanted=(1,)))
    assert found.forward_s == pytest.approx(launch + 2 * 0.25)
    assert found.backward_s == pytest.approx(found.forward_s)
    assert found.weights_s == 0.0
    assert kernels.seconds(replace(thin, wanted=())).backward_s == 0.0
    assert kernels.seconds(replace(thin, op="mm")).forward_s < 0.01  # another operator


def test_products_run_at_the_rate_of_products_of_their_size() -> None:
    table = Table(MADE)
    square = TensorSpec((64, 64), "float32")
    made = LocalOperator("mm", (square, square), (square,), flops=2.0 * 64**3, wanted=(0, 1))
    found = table.seconds(made)
    assert found is not None
    assert found.forward_s == pytest.approx(1e-5 + MADE.launch_s)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert Table(MADE, slowdown=2.0).seconds(made).forward_s == pytest.approx(  # type: ignore[union-attr]
        2 * found.forward_s
    )


def test_collectives_are_interpolated_by_size_and_extended() -> None:
    table = Table(MADE)
    group = ((0, 4),)
    assert table.exchange("all_reduce", 1 << 10, group) == pytest.approx((1e-3, 1e-3, 3.0))
    middle = table.exchange("all_reduce", ((1 << 20) + (1 << 10)) / 2, group)
    assert middle is not None
    assert middle == pytest.approx((2e-3, 1e-3, 1.0))  # half of their time is lost: twice as long
    slope = 2e-3 / ((1 << 20) - (1 << 10))
    beyond = table.exchange("all_reduce", 1 << 22, group)
    assert beyond is not None
    assert beyond[0] == pytest.approx(3e-3 + slope * 3 * (1 << 20))
    assert beyond[2] == pytest.approx(1 / 3)
    assert table.exchange("all_reduce", 0.0, group) == pytest.approx((1e-3, 1e-3, 3.0))
    assert table.exchange("all_gather", 1.0, group) is None
    assert table.exchange("all_reduce", 1.0, ((0, 2),)) is None


def test_noise_makes_no_larger_collective_faster() -> None:
    """4 KiB were faster than 1 KiB; what is beyond the table still takes longer."""
    noisy = ((1 << 8, 1e-3), (1 << 10, 3e-3), (1 << 12, 2e-3))
    found = tuple(TimedCollective("all_reduce", ((0, 4),), n, t, 0.0) for n, t in noisy)
    table = Table(replace(MADE, collectives=found))
    times = []
    for size in (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 30):
        exchange = table.exchange("all_reduce", size, ((0, 4),))
        assert exchange is not None
        seconds, latency_s, _ = exchange
        assert latency_s <= seconds
        times.append(seconds)
    assert times[1:3] == [3e-3, 3e-3]
    assert times == sorted(times)
    assert times[-1] > 100 * times[-2]


def test_predictions_follow_the_table_and_say_so() -> None:
    graph = perceptron()
    (decisions,) = data_parallel(graph, CLUSTER)
    pcg = lower(graph, decisions)
    cluster, kernels = calibrated(CLUSTER, MADE)
    assert source_of([pcg], kernels, MADE).name == CALIBRATED
    computes = [item for item in pcg.main.body if isinstance(item, Compute)]
    operators = tuple(
        Timed(key, 0.01, 0.02)
        for key in {key_of(local_operator(item, pcg.mesh)) for item in computes}
    )
    full = replace(MADE, operators=operators)
    cluster, kernels = calibrated(CLUSTER, full)
    found = source_of([pcg], kernels, full)
    assert found.name == MEASURED
    assert found.error == pytest.approx(math.hypot(CPU_ERRORS[MEASURED], full.error))
    played = simulate(pcg, cluster, decisions, kernels=kernels)
    assert played.step_s > 0.01 * len(computes)
    low, high = found.band(1.0)
    assert low * high == pytest.approx(1.0)
    h100, mi300 = (load_cluster(name).device for name in ("8xH100", "8xMI300X"))
    assert error_of(MEASURED, h100) == KNOWN
    # A device that no run had, and memory that is nearly full, widen the band.
    assert error_of("spec", mi300) > error_of("spec", h100)
    assert error_of("spec", h100, h100.memory_bytes) > error_of("spec", h100)
    # Rates of another machine are used, and said to be less sure.
    strange = source_of([pcg], kernels, full, mismatches(full, CLUSTER, replace(HERE, cores=64)))
    assert strange.error > found.error
    assert strange.notes == ("calibrated on another machine (cores: 2, not 64)",)


def test_calibrations_of_other_devices_and_back_ends_are_told() -> None:
    assert not mismatches(MADE, CLUSTER, HERE)
    assert not mismatches(MADE, CLUSTER, None)
    with pytest.raises(InputError, match=r"calibration is of cpu \(gloo\), and .* has H100-SXM5"):
        mismatches(MADE, load_cluster("8xH100"), HERE)
    a100 = replace(MADE, fingerprint=replace(HERE, device="A100-SXM4-80GB", backend="nccl"))
    lines = mismatches(a100, load_cluster("8xH100"), HERE)
    assert lines == ("device: A100-SXM4-80GB, not H100-SXM5-80GB",)


def test_collectives_over_other_links_are_told() -> None:
    made = replace(MADE, links=links_of(load_cluster("2x2xcpu")))
    assert made.links == ("900 MB/s", "125 MB/s")
    assert calibration_from_json(calibration_to_json(made), "here") == made
    for spec in ("2x2xcpu", "4xcpu", "2x4xcpu"):
        assert not mismatches(made, load_cluster(spec), HERE)
    cluster = load_cluster("2x2xcpu")
    inner, outer = cluster.levels
    slow = replace(outer, link=replace(outer.link, bandwidth_bytes_per_s=12.5e6))
    other = replace(cluster, levels=(inner, slow))
    assert mismatches(made, other, HERE) == ("links: 125 MB/s, not 12.5 MB/s",)


@pytest.mark.parametrize("lost", [0.0, 0.2, 0.5, 0.9, 3.0])
def test_kernels_lose_beside_collectives_as_was_measured(lost: float) -> None:
    pcg = lower(blocks(), chunked(CLUSTER))

    def play(part: float) -> Timeline:
        found = [
            TimedCollective(kind, group, 1 << 10, 1e-3, part)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            for group in (((0, 4),), ((0, 2),), ((1, 2),))
        ]
        made = replace(MADE, collectives=tuple(found))
        cluster, kernels = calibrated(CLUSTER, made)
        return simulate(pcg, cluster, pcg.decisions, kernels=kernels)

    free, played = play(0.0), play(lost)
    slowed = played.busy()[COMPUTE] - free.busy()[COMPUTE]
    moving = sum(played.busy().values()) - played.busy()[COMPUTE]
    beside = moving - sum(played.exposed().values())
    assert beside > 0
    assert slowed == pytest.approx(min(lost, MOST_LOST) * beside, rel=1e-3)
    assert played.step_ps >= free.step_ps
    assert played.peak_bytes == free.peak_bytes


def test_one_device_has_no_collective_to_look_up() -> None:
    graph = perceptron()
    pcg = lower(graph, Decisions())
    cluster, kernels = calibrated(load_cluster("1xcpu"), MADE)
    assert isinstance(kernels, Kernels)
    assert simulate(pcg, cluster, Decisions(), kernels=kernels).step_s > 0


def test_messages_between_stages_take_what_was_measured() -> None:
    """Where no message was measured, what an all-reduce of two ranks takes, which sends as much;
    without that, what data sheets say.
    """
    over = ((0, 2),)
    sent = (TimedCollective("send", over, 1 << 10, 1e-3, 0.0),
            TimedCollective("send", over, 1 << 20, 9e-2, 0.0))  # fmt: skip
    summed = (TimedCollective("all_reduce", over, 1 << 10, 2e-3, 0.0),
              TimedCollective("all_reduce", over, 1 << 20, 1e-1, 0.0))  # fmt: skip
    times = []
    for known in (sent + summed, summed, ()):
        cluster, kernels = calibrated(CLUSTER, replace(MADE, collectives=known))
        found = send(1 << 20, 1 << 20, Join(cluster, 0), kernels)
        times.append((found.ps, found.latency_ps))
    assert times[0] == (picoseconds(9e-2), picoseconds(1e-3))
    assert times[1] == (picoseconds(1e-1), picoseconds(2e-3))
    cluster, _ = calibrated(CLUSTER, MADE)
    assert times[2][0] == send(1 << 20, 1 << 20, Join(cluster, 0)).ps < times[0][0] / 10
