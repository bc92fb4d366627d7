"""What `calibrate` measures: every operator of a program, and collectives between ranks."""

import json
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from parloom import api, cli, zoo
from parloom.capture import capture
from parloom.comparators.baselines import METHODS
from parloom.cost.calibration import (
    Calibration,
    Product,
    TimedCollective,
    calibration_from_json,
    calibration_to_json,
    key_of,
    links_of,
)
from parloom.cost.cluster_file import read_cluster_text
from parloom.cost.clusters import load_cluster
from parloom.cost.local_operators import local_operator
from parloom.cost.measured import calibrated, mismatches, source_of
from parloom.errors import InputError
from parloom.execute import calibrate as measuring
from parloom.execute import measure_collectives
from parloom.execute.calibrate import calibrate, fingerprint, mean_of
from parloom.execute.clock import Clock
from parloom.execute.measure import operators
from parloom.execute.measure_collectives import collectives
from parloom.execute.ranks import fork_ranks
from parloom.ir.lower import lower
from parloom.ir.ops import op_of
from parloom.ir.pcg import PCG, Compute
from parloom.ir.regular_parts import regular_parts
from parloom.runtime import operators as runtime_operators
from parloom.runtime.comm import SingleGroup
from tests.unit.test_adjacent import changed
from tests.unit.test_adjacent import lowered as merged_products
from tests.zoo_sizes import small

CPU = torch.device("cpu")
SLOW = (
    "{name: slow, device: {name: core, memory: 2GiB, memory_bandwidth: 5GB/s,"
    " rates: {fp32: 12GFLOP/s}}, backend: gloo, levels: [{name: net, size: 4,"
    " bandwidth: 100Mbit/s, latency: 200us}]}"
)


def lowered(name: str, method: str) -> PCG:
    model, batch = small(name) if name != "mlp" else zoo.build("mlp", batch=8)
    graph = capture(model.train(), batch)
    decisions = list(METHODS[method](graph, load_cluster("2xcpu"), 1, 0))[-1]
    return lower(graph, decisions)


def keys(pcg: PCG) -> set[str]:
    bodies = (pcg.main.body, *(function.body for function in pcg.functions))
    computes = [i for body in bodies for i in body if isinstance(i, Compute)]
    return {
        key_of(local_operator(item, pcg.mesh)) for item in computes if not op_of(item.node).view
    }


def test_every_operator_of_a_program_is_measured_once() -> None:
    said: list[str] = []
    for method in ("data_parallel", "megatron"):
        pcg = lowered("gpt", method)
        found = list(operators([pcg, pcg], Clock(CPU, 1e-4), said.append))
        assert {timed.key for timed in found} == keys(pcg)
        assert len(found) == len(keys(pcg))
        assert all(timed.forward_s > 0 for timed in found)
        products = [t for t in found if t.key.startswith("linear")]
        assert products
        assert all(t.backward_s > 0 for t in products)
    assert not said


@pytest.mark.parametrize("together", [True, False])
def test_a_merged_product_is_measured_as_its_weights_lie(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    frozen = [
        (f'"{i}.{n}", trainable=True', f'"{i}.{n}", trainable=False') for i in "01" for n in "vd"
    ]
    pcg = merged_products() if together else merged_products(changed(*frozen))
    lie_so: set[bool] = set()
    joined = runtime_operators._joined

    def seen(parts: tuple[torch.Tensor, ...], in_place: bool) -> torch.Tensor:
        first, second = parts
        assert in_place is together
        lie_so.add(second.data_ptr() == first.data_ptr() + first.nbytes)
        return joined(parts, in_place)

    monkeypatch.setattr(runtime_operators, "_joined", seen)
    found = [t for t in operators([pcg], Clock(CPU, 1e-4)) if "linears" in t.key]
    assert together in lie_so  # tensors of their own may lie so by chance
    assert {"in place" in timed.key for timed in found} == {together}
    assert all(timed.backward_s > 0 for timed in found)


def test_more_work_takes_longer() -> None:
    clock = Clock(CPU, 0.02)
    narrow, wide = (
        next(
            t
            for t in operators([lowered_mlp(width)], clock)
            if t.key.startswith("linear") and f"float32[{width}, {width}]" in t.key
        )
        for width in (64, 512)
    )
    # 64 times the work; less than that, since launching takes as long.
    assert wide.forward_s > 2 * narrow.forward_s
    assert wide.backward_s > 2 * narrow.backward_s


def test_a_machine_that_stalls_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def typical(stalled: set[int]) -> float:
        rounds = count()
        took = lambda clock, run: 5.0 if next(rounds) in stalled else 0.01  # noqa: E731
        monkeypatch.setattr(Clock, "elapsed", took)
        return Clock(CPU, 0.3).typical(lambda: None)

    assert typical(set()) == pytest.approx(0.01)
    assert typical({4}) == pytest.approx(0.01)
    # Windows apart from each other that all stall are how fast the machine is.
    assert typical({4, 14, 15, 24, 25, 26}) > 0.1


def test_nor_does_it_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds of a call alone, of products, of both at once.
    usual = (0.02, 0.02, 0.03)

    def timed(stalled: set[int]) -> tuple[float, float]:
        windows = [5.0 if i in stalled else s for i, s in enumerate(3 * usual)]
        left = iter([usual[0], *windows])  # two calls first, to see how long one takes
        took = lambda call, calls, *others: next(left) * calls  # noqa: E731
        monkeypatch.setattr(measure_collectives, "_elapsed", took)
        monkeypatch.setattr(measure_collectives, "_most", lambda value: value)
        start = partial(SingleGroup().broadcast, torch.zeros(1))
        one = torch.zeros(1, 1)
        products = measure_collectives._Products(one, one, one, 1e-3)
        return measure_collectives._timed(start, products, 0.3)

    assert timed(set()) == pytest.approx((0.02, 0.5))
    for one in range(9):
        assert timed({one}) == pytest.approx((0.02, 0.5))
    # Windows most of which stall are how long it takes, and how much it takes.
    assert timed({0, 3})[0] == pytest.approx(5.0)
    assert timed({2, 5})[1] > 100


def lowered_mlp(width: int) -> PCG:
    model, batch = zoo.build("mlp", batch=64, hidden=width)
    graph = capture(model.train(), batch)
    return lower(graph, next(METHODS["data_parallel"](graph, load_cluster("1xcpu"), 1, 0)))


def on_rank() -> Calibration:
    cluster = load_cluster("4xcpu")
    (whole,) = regular_parts(cluster)
    timed = list(collectives(whole, CPU, sizes=(1 << 10, 1 << 16), least_s=1e-3))
    assert {t.group for t in timed} == {((0, 2),), ((0, 4),)}
    return calibrate([], cluster, least_s=1e-3)


@pytest.mark.slow
def test_ranks_measure_collectives_and_agree() -> None:
    first, *others = fork_ranks(4, on_rank)
    assert first.num_ranks == 4
    assert len(first.collectives) == (2 * 4 + 1) * 5  # two groups of four kinds, and messages
    for other in others:
        assert other.streams == first.streams
        assert other.launch_s == first.launch_s
        assert [c.seconds for c in other.collectives] == [c.seconds for c in first.collectives]
    assert calibration_from_json(calibration_to_json(first), "here") == first


def test_the_mean_over_ranks_is_of_equal_products() -> None:
    """A float32 product of 2048 and a bfloat16 one of 32 were averaged, by their places. Here rank
    0 stops at 64, as one does for which that takes long; the other goes on to 128.
    """
    ranks = []
    for rank in range(2):
        sides = {"float32": (64, 128)[: 1 + rank], "bfloat16": (64,)}
        ranks.append([Product(d, n, n, n, n * 1e-3 * (1 + rank)) for d in sides for n in sides[d]])
    kept = tuple(Product(dtype, 64, 64, 64, 0.096) for dtype in ("float32", "bfloat16"))
    found = mean_of(ranks)
    assert [replace(p, seconds=0.0) for p in found] == [replace(p, seconds=0.0) for p in kept]
    assert [p.seconds for p in found] == pytest.approx([p.seconds for p in kept])


MIXED = """
backend: gloo
join: {name: network, bandwidth: 1Gbit/s, latency: 100us}
parts:
  - device: {name: fast, memory: 2GiB, memory_bandwidth: 5GB/s, rates: {fp32: 9GFLOP/s}}
    levels: [{name: host, size: 2, bandwidth: 10Gbit/s}]
  - device: {name: slow, memory: 1GiB, memory_bandwidth: 5GB/s, rates: {fp32: 9GFLOP/s}}
    levels: [{name: host, size: 1, bandwidth: 10Gbit/s}]
"""


def on_mixed_rank() -> Calibration:
    cluster, _ = read_cluster_text(MIXED, "mixed.yaml")
    return calibrate([lowered_mlp(64)], cluster, least_s=1e-3)


def test_a_mixed_cluster_is_measured_type_by_type() -> None:
    found, *others = fork_ranks(3, on_mixed_rank)
    assert all(other == found for other in others)
    assert [name for name, _ in found.types] == ["fast", "slow"]
    fast, slow = (own for _, own in found.types)
    assert fast.fingerprint.device == "fast"
    assert slow.fingerprint.device == "slow"
    # Two devices of one type exchange; what joins the parts is known to all.
    assert {c.kind for c in fast.collectives if c.group == ((0, 2),)} > {"all_reduce", "send"}
    assert not slow.collectives
    assert {(c.kind, c.group) for c in found.collectives} == {("send", ((1, 2),))}
    # The mean over all ranks, two of which are fast.
    means = [
        (2 * a.seconds + b.seconds) / 3 for a, b in zip(fast.streams, slow.streams, strict=True)
    ]
    assert [s.seconds for s in found.streams] == pytest.approx(means)
    assert calibration_from_json(calibration_to_json(found), "here") == found


def test_stages_are_priced_by_what_was_measured_of_their_type() -> None:
    cluster, _ = read_cluster_text(MIXED, "mixed.yaml")
    pcg = lowered_mlp(64)
    own = calibrate([pcg], None, least_s=1e-3)

    def times(factor: float, device: str) -> Calibration:
        operators = (
            replace(o, forward_s=factor * o.forward_s, backward_s=factor * o.backward_s)
            for o in own.operators
        )
        return replace(
            own, operators=tuple(operators), fingerprint=replace(own.fingerprint, device=device)
        )

    mixed = replace(own, types=(("fast", times(1, "fast")), ("slow", times(7, "slow"))))
    assert mismatches(mixed, cluster, None) == ()
    # A part alone has links of its own, which no message between parts went over.
    linked = replace(mixed, links=links_of(cluster))
    fast_links = links_of(regular_parts(cluster)[0].alone)
    fast = replace(dict(linked.types)["fast"], links=fast_links)
    linked = replace(linked, types=(("fast", fast), linked.types[1]))
    assert mismatches(linked, regular_parts(cluster)[0].alone, None) == ()
    assert mismatches(replace(linked, links=("1B/s",)), cluster, None) != ()
    assert mismatches(own, cluster, None) == tuple(
        f"device: {own.fingerprint.device}, not {name}" for name in ("fast", "slow")
    )
    measured, kernels = calibrated(cluster, mixed)
    assert [p.cluster.device.name for p in measured.parts] == ["fast", "slow"]
    computed = [item for item in pcg.main.body if isinstance(item, Compute)]
    operator = local_operator(computed[0], pcg.mesh)
    times_s = [kernels.on(p.cluster.device).seconds(operator).forward_s for p in measured.parts]
    assert times_s[1] == pytest.approx(7 * times_s[0])


def test_a_calibration_with_the_model_is_called_measured() -> None:
    pcg = lowered("gpt", "data_parallel")
    made = calibrate([pcg], None, least_s=1e-3)
    assert made.fingerprint == fingerprint()
    # What is not in the table must not seem long where the machine was busy.
    slow = tuple(replace(o, forward_s=1.0, backward_s=1.0) for o in made.operators)
    made = replace(made, operators=slow)
    _, kernels = calibrated(load_cluster("2xcpu"), made)
    # Of several ranks only where collectives were measured: links are assumed without.
    assert source_of([pcg], kernels, made).name == "calibrated"
    sent = TimedCollective("all_reduce", ((0, 2),), 1024, 1e-3, 0.0)
    assert source_of([pcg], kernels, replace(made, collectives=(sent,))).name == "measured"
    _, without = calibrated(load_cluster("2xcpu"), calibrate([], None, least_s=1e-3))
    assert source_of([pcg], without, made).name == "calibrated"


def test_progress_is_told_while_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "EVERY_S", 0.0)
    said: list[str] = []
    calibrate([], None, said.append, least_s=1e-4)
    assert "2 products so far" in said


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command measures next to nothing; the file that it writes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "calibrate", partial(calibrate, least_s=1e-3))
    return tmp_path / "new" / "calibration.json"


def test_the_command_writes_what_plans_and_simulations_take(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factory = quick.parents[1] / "factory.py"
    factory.write_text(
        "from parloom import zoo\ndef build():\n"
        "    return zoo.build('mlp', batch=8, features=8, hidden=16, classes=4)\n"
    )
    spec = f"{factory}:build"
    assert cli.main(["calibrate", "--out", str(quick), "--model", spec]) == 0  # on one device
    assert "operators" in capsys.readouterr().out
    assert cli.main(["calibrate", "--out", str(quick), "--model", spec, "--cluster", "2xcpu"]) == 0
    assert f"parloom plan MODEL --cluster C --calibration {quick}" in capsys.readouterr().out
    assert sorted(quick.parent.iterdir()) == [quick]
    given = ["--calibration", str(quick)]
    planned = ["plan", spec, "--cluster", "2xcpu", "--devices", "2", "--method", "data_parallel"]
    assert cli.main([*planned, "--out", "run", *given]) == 0
    assert "(from measured rates; likely " in capsys.readouterr().out
    assert cli.main(["simulate", "run", "--json", *given]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == "calibrated"  # no collective was measured
    (alone,) = document["notes"]
    assert alone.startswith("operators are measured, by one process; links, and")
    assert cli.main(["simulate", "run"]) == 0
    assert "not calibrated" in capsys.readouterr().out
    # Of another machine: used, said so, and the band is wider.
    other = json.loads(quick.read_text())
    other["fingerprint"]["processor"] = "another"
    quick.write_text(json.dumps(other))
    assert cli.main(["simulate", "run", "--json", *given]) == 0
    strange = json.loads(capsys.readouterr().out)
    assert strange["step_s"] == document["step_s"]
    assert strange["band_s"][1] > document["band_s"][1]
    assert "calibrated on another machine (processor: another, not" in strange["notes"][0]
    for broken, said in (("NaN", "finite number"), ("-1.0", "from 1e-09 to 10 s")):
        quick.write_text(
            json.dumps(other | {"launch_s": 0.5}).replace(
                '"launch_s": 0.5', f'"launch_s": {broken}'
            )
        )
        for command in (["plan", spec, "--cluster", "2xcpu"], ["simulate", "run"]):
            assert cli.main([*command, *given]) == 2
            assert f"{quick}: launch_s: " in (err := capsys.readouterr().err)
            assert said in err
    quick.unlink()
    assert cli.main(["simulate", "run", *given]) == 2
    assert "cannot read the calibration" in capsys.readouterr().err


def test_what_cannot_be_calibrated_is_told(
    quick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = quick.parents[1] / "occupied"
    occupied.write_text("")
    assert cli.main(["calibrate", "--out", str(occupied / "c.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert cli.main(["calibrate", "--out", str(quick)]) == 8
    assert not quick.exists()


def wrong_cluster() -> str:
    with pytest.raises(InputError, match="8xcpu has 8 devices, and 2 ranks were started") as told:
        calibrate([], load_cluster("8xcpu"), least_s=1e-3)
    return str(told.value)


def test_more_devices_than_ranks_are_refused() -> None:
    assert len(set(fork_ranks(2, wrong_cluster))) == 1


@pytest.mark.slow
def test_models_whose_rules_of_thumb_are_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's best plan of a model with equal blocks may have stages: all of their operators."""
    programs: list[str] = []

    def counted(pcgs: list[PCG], *_: object) -> None:
        programs.extend(pcg.main.name for pcg in pcgs)

    monkeypatch.setattr(measuring, "calibrate", counted)
    found = api.search(api.capture("zoo:gpt", batch=8), cluster=SLOW, method="megatron")
    assert len(found.decisions.stages) == 4
    api.calibrate(["zoo:gpt"], cluster=SLOW)
    assert len(programs) > 4
