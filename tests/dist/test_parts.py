"""A plan on a part of a cluster is saved, proved, simulated and run on the devices that it uses."""

from pathlib import Path

import pytest

from parloom import api, cli
from parloom.errors import InputError, LaunchError
from parloom.execute.startup import check_world_size

FACTORY = """
from parloom import zoo
def build():
    return zoo.build("mlp", batch=8, features=8, hidden=16, classes=4)
"""
CLUSTER = "2x2xcpu"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(FACTORY, encoding="utf-8")
    return f"{path}:build"


@pytest.fixture(scope="module")
def captured(spec: str) -> api.Captured:
    return api.capture(spec)


def test_the_answer_says_which_devices_are_idle(captured: api.Captured) -> None:
    found = api.search(captured, cluster=CLUSTER)
    assert found.decisions.mesh.num_ranks == 1  # messages take longer than computing
    assert found.prediction is not None
    assert found.bound_s is not None
    assert found.bound_s <= found.prediction.step_s
    assert found.notes[0].startswith("one device will do, 0.25 of the price: 3 of 4 devices stay")
    assert not any(line.startswith("warning") for line in found.notes)
    alone = api.search(captured, cluster="1xcpu").prediction
    assert alone is not None
    assert found.prediction.step_s == alone.step_s == api.simulate(found).step_s


@pytest.mark.parametrize("method", ["auto", "fsdp"])
def test_devices_that_are_asked_for_are_used(captured: api.Captured, method: str) -> None:
    found = api.search(captured, cluster=CLUSTER, devices=2, method=method)
    assert found.decisions.stages[0].devices == (range(2),)
    (cost,) = found.constraints
    assert cost.text == "--devices 2"
    assert found.prediction is not None
    assert cost.step_s is not None
    # `auto` leaves the second device idle.
    assert (cost.step_s < found.prediction.step_s) == (method == "fsdp")
    assert found.command().endswith("--devices 2")
    with pytest.raises(InputError, match=r"3 devices are no part of .*; a plan uses 4, 2, 1 of"):
        api.search(captured, cluster=CLUSTER, devices=3)


def test_a_plan_on_a_part_is_proved_and_saved(captured: api.Captured, tmp_path: Path) -> None:
    found = api.search(captured, cluster=CLUSTER, devices=2, method="megatron")
    written = api.save(found, tmp_path)["plan"]
    assert '"devices": "0-1"' in written.read_text(encoding="utf-8")
    plan = api.load(tmp_path)
    assert plan == found
    report = api.verify(plan)
    assert (report.passed, report.num_ranks) == (True, 2)
    assert api.explain(plan).document["num_devices"] == 2


def test_other_devices_are_refused(captured: api.Captured, tmp_path: Path) -> None:
    found = api.search(captured, cluster=CLUSTER, devices=2, method="fsdp")
    api.save(found, tmp_path)
    file = tmp_path / "plan.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"devices": "0-1"', '"devices": "2-3"'), encoding="utf-8")
    with pytest.raises(InputError, match="no stage has device 0, and some have devices after it"):
        api.load(tmp_path)
    file.write_text(text.replace(CLUSTER, "3x3xcpu"), encoding="utf-8")
    with pytest.raises(InputError, match="2 devices are no part of 3x3xcpu; a plan uses 9, 3, 1"):
        api.load(tmp_path)


def test_a_plan_file_on_a_part_is_a_method(captured: api.Captured, tmp_path: Path) -> None:
    first = api.search(captured, cluster=CLUSTER, devices=2, method="fsdp")
    path = str(api.save(first, tmp_path)["plan"])
    again = api.search(captured, cluster=CLUSTER, method=path)
    assert again.decisions == first.decisions
    assert again.prediction == first.prediction


def test_too_many_ranks_are_told_how_many_to_start(captured: api.Captured) -> None:
    found = api.search(captured, cluster=CLUSTER, devices=2, method="fsdp")
    check_world_size(found, 2)
    with pytest.raises(LaunchError) as told:
        check_world_size(found, 4)
    said = str(told.value)
    assert "for 2 ranks (of the 4 of 2x2xcpu) and this job has 4; start 2 processes" in said
    assert said.endswith("--devices 4")
    assert "--devices 2" not in said


def test_the_screen_of_a_plan_on_a_part(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    given = ["plan", spec, "--cluster", CLUSTER, "--devices", "2", "--method", "fsdp"]
    assert cli.main([*given, "--out", out]) == 0
    screen = capsys.readouterr().out
    assert "devices       2 of 4" in screen
    assert "--devices 2 costs" in screen
    assert cli.main(["simulate", out]) == 0
    assert "on 2 of 2x2xcpu (2 x cpu): fsdp" in capsys.readouterr().out
