"""`parloom plan` on several clusters and `parloom scale`, on a small model."""

import json
from pathlib import Path
from typing import Any

import pytest

from parloom import api, cli, fronts
from parloom.errors import InfeasibleError, StoppedError
from parloom.ir.expected import Objective
from parloom.report.fronts import front_document

FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=2048, features=256, hidden=1024, classes=8)
"""
PRICE = "H100=2/gpu-h,A100=1/gpu-h"
SMALL = json.dumps(
    {
        "name": "tiny",
        "device": {
            "name": "chip",
            "memory": "64kB",
            "memory_bandwidth": "1TB/s",
            "rates": {"fp32": "1TFLOP/s"},
            "price_per_hour": "1USD",
        },
        "levels": [{"name": "l", "size": 2, "bandwidth": "9GB/s"}],
    }
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY, encoding="utf-8")
    return f"{path}:build"


@pytest.fixture(scope="module")
def captured(spec: str) -> api.Captured:
    return api.capture(spec)


def silent(text: str) -> None:
    """Nothing is said."""


def asked(**more: Any) -> dict[str, Any]:
    return {"price": PRICE, "method": "data_parallel", **more}


def question(*clusters: str, every: bool = True, **more: Any) -> fronts.Question:
    return fronts.Question(clusters, more.pop("objective", Objective.COST), every, **more)


def test_every_part_of_every_cluster_once(captured: api.Captured) -> None:
    """16 A100 have the parts of 8; the larger cluster adds its own size alone."""
    both = question("1x4xH100", "1x2xA100", "2x2xA100")
    found = fronts.front(captured, both, silent, asked()).front
    assert [(row.cluster, row.num_devices) for row in found.rows] == [
        ("1x4xH100", 1), ("1x4xH100", 2), ("1x4xH100", 4),
        ("1x2xA100", 1), ("1x2xA100", 2),
        ("2x2xA100", 4),
    ]  # fmt: skip
    dollars = {"1x4xH100": 2.0, "1x2xA100": 1.0, "2x2xA100": 1.0}
    for row in found.rows:
        assert row.plan is not None
        assert row.plan.usd_per_step is not None
        usd = row.plan.step_s * row.num_devices * dollars[row.cluster] / 3600
        assert row.plan.usd_per_step == pytest.approx(usd)
    assert found.best is found.pareto[0]
    for row in found.rows:  # nothing on the front is beaten
        for other in found.pareto:
            assert row.plan is not None
            assert other.plan is not None
            assert row.plan.step_s >= other.plan.step_s or (row.plan.usd_per_step or 0) > (
                other.plan.usd_per_step or 0
            )


def test_each_row_is_what_plan_answers(captured: api.Captured) -> None:
    alone = question("1x4xH100", "1x2xA100", every=False, objective=Objective.TIME)
    found = fronts.front(captured, alone, silent, asked(method="megatron"))
    for row in found.front.rows:
        plan = api.search(captured, cluster=row.cluster, **asked(method="megatron"))
        assert plan.prediction is not None
        assert row.plan is not None
        assert row.plan.step_s == plan.prediction.step_s
        if row is found.front.best:
            assert found.plan == plan
    assert found.front.best in found.front.rows


def test_a_cluster_without_a_plan_is_a_row_with_the_reason(captured: api.Captured) -> None:
    both = question(SMALL, "1x2xA100")
    found = fronts.front(captured, both, silent, asked()).front
    assert [row.plan is None for row in found.rows] == [True, False, False]
    assert "no plan fits" in found.rows[0].reason
    document = front_document(found, None)
    assert document["rows"][0]["cost"] is None
    with pytest.raises(InfeasibleError, match=r"no cluster has a plan:\n.*no plan fits"):
        fronts.front(captured, question(SMALL), silent, asked(price=None))


def test_ctrl_c_keeps_the_clusters_that_are_done(captured: api.Captured) -> None:
    stop_at = "1x2xA100"

    def stop(text: str) -> None:
        if text.startswith(stop_at):
            raise KeyboardInterrupt

    both = question("1x2xH100", "1x2xA100")
    found = fronts.front(captured, both, stop, asked())
    assert found.front.interrupted
    assert {row.cluster for row in found.front.rows} == {"1x2xH100"}
    stop_at = ""
    with pytest.raises(StoppedError):
        fronts.front(captured, both, stop, asked())


def test_the_cheapest_that_is_in_time(captured: api.Captured) -> None:
    def days(limit: float | None) -> fronts.Answer:
        wanted = question("1x4xH100", in_run=1e12, limit_days=limit)
        return fronts.front(captured, wanted, silent, asked())

    free = days(None)
    takes = {
        row.num_devices: free.front.work.days(row.plan.step_s) or 0.0
        for row in free.front.rows
        if row.plan
    }
    fastest, cheapest = min(takes, key=takes.__getitem__), free.front.best
    assert cheapest is not None
    assert cheapest.num_devices != fastest
    tight = days(takes[fastest])
    assert tight.front.best is not None
    assert tight.front.best.num_devices == fastest
    assert tight.plan.decisions.num_ranks == fastest
    assert tight.plan.aim is not None
    assert free.plan.aim is not None
    assert tight.plan.aim.value > free.plan.aim.value
    with pytest.raises(fronts.TooSlowError, match="the fastest takes") as error:
        days(takes[fastest] / 2)
    assert error.value.front.best is None
    assert error.value.exit_code == 3


def document(command: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> Any:
    assert cli.main(command) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_one_command_for_the_cheapest_cluster(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["plan", spec, "--method", "data_parallel", "--price", PRICE, "--tokens", "1T"]
    command += ["--cluster", "1x2xH100,1x2xA100", "--out", str(out), "--json"]
    found = document([*command, "--pareto"], 0, capsys)
    assert found["pareto"][0]["cost"]["usd"] > 0
    assert found["objective"] == "time"
    assert json.loads((out / "front.json").read_text()) == found
    assert api.load(out).decisions.num_ranks == found["best"]["num_devices"]
    longest = found["pareto"][0]["cost"]["days"]
    cheap = document([*command, "--days", str(longest)], 0, capsys)
    assert cheap["objective"] == "cost"
    assert cheap["best"]["cost"]["usd"] == found["pareto"][0]["cost"]["usd"]
    # The plan remembers the price that it was made with.
    assert '"price_source": "--price"' in api.load(out).cluster
    none = document([*command, "--days", "0.001"], 3, capsys)
    assert none["best"] is None


def test_processors_have_the_price_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "zoo:mlp", "--cluster", "1xcpu,2xcpu", "--method", "data_parallel"]
    more = ["--price", "cpu=0.1/gpu-h", "--objective", "cost", "--out", str(tmp_path)]
    found = document([*command, *more, "--json"], 0, capsys)
    assert [row["num_devices"] for row in found["rows"]] == [1, 2]
    assert found["best"]["cost"]["usd"] is None
    assert found["best"]["cost"]["usd_per_step"] > 0


def test_one_plan_with_its_costs(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    command = ["plan", spec, "--cluster", "1x2xA100", "--method", "fsdp", "--out", out]
    more = ["--price", "1/gpu-h", "--tokens", "1T", "--objective", "cost"]
    assert cli.main([*command, *more]) == 0
    text = capsys.readouterr().out
    assert "$1.00 an hour of a device (--price, as given)" in text
    assert "days, $" in text
    assert "the cheapest step that was found" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "4xcpu", "--pareto"], "no price is known for cpu"),
        (["--cluster", "4xcpu", "--objective", "cost"], "no price is known for cpu"),
        (["--cluster", "8xH100", "--price", "2.10"], "'2.10' has no unit; write 2.10/gpu-h"),
        (["--cluster", "8xH100,4xA100", "--price", "2.10"], "'2.10' has no unit"),
        (["--cluster", "8xH100", "--price", "L40=1/gpu-h"], "no cluster has a device"),
        (["--cluster", "8xH100", "--tokens", "many"], "--tokens: 'many' is no such number"),
        (["--cluster", "8xH100", "--days", "30"], "--days is for a run: say how long it is"),
        (["--cluster", "8xH100,"], "write clusters with commas between them"),
        (["--cluster", "8xH100,8xH1000"], "unknown device 'H1000'"),
    ],
)
def test_bad_usage(
    spec: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", spec, *flags]) == 2
    result = capsys.readouterr()
    assert words in " ".join(result.err.split())
    assert result.out == ""
    assert "capturing" not in result.err


def test_scaling_curves(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["scale", "zoo:mlp", "--batch", "64", "--method", "data_parallel", "--json"]
    strong = document([*command, "--cluster", "1x2xA100"], 0, capsys)
    assert [p["num_devices"] for p in strong["points"]] == [1, 2]
    assert {p["samples_per_step"] for p in strong["points"]} == {64}
    weak = document([*command, "--cluster", "1x1xA100", "--up-to", "2", "--weak"], 0, capsys)
    assert [p["samples_per_step"] for p in weak["points"]] == [64, 128]
    assert weak["points"][1]["efficiency"] > strong["points"][1]["efficiency"]
    assert weak["points"][0]["speedup"] == 1.0
    assert weak["points"][0]["step_s"] == strong["points"][0]["step_s"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cluster", "1x8xA100", "--up-to", "8"], "give 16 or more"),
        (["--cluster", "1x8xA100", "--up-to", "99999999"], "at most 1048576 devices"),
        (["--cluster", SMALL, "--up-to", "8"], "only nodes x devices x device can grow"),
        (["--cluster", "1x2xA100", "--price", "1"], "has no unit"),
    ],
)
def test_bad_scaling(
    spec: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scale", spec, *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_batch_of_a_factory_does_not_grow(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", spec, "--cluster", "1x2xA100", "--weak"]) == 2
    assert "a factory makes its own batch" in " ".join(capsys.readouterr().err.split())
