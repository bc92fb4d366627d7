"""`parloom report` as a command: the page it writes, and what it refuses."""

import json
from pathlib import Path

import pytest

from parloom import cli

PLAN = ["plan", "zoo:mlp", "--cluster", "2xA100-80GB", "--method", "data_parallel"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plans")
    assert cli.main([*PLAN, "--out", str(found / "one")]) == 0
    assert cli.main([*PLAN[:-1], "fsdp", "--out", str(found / "two")]) == 0
    assert cli.main([*PLAN, "--batch", "16", "--out", str(found / "other")]) == 0
    return found


def test_a_page_of_two_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "both.html"
    given = ["report", str(folder / "one"), str(folder / "two"), "--out", str(out)]
    assert cli.main(given) == 0
    assert capsys.readouterr().out.startswith(f"report {out}: ")
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count("<h1>") == 2


def test_its_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder / "one"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"]) == ("parloom.report", 1)
    (plan,) = document["plans"]
    assert {other["versus"]["name"] for other in plan["why_not"]} == {"fsdp", "megatron"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing"], 2, "missing"),
        (["one", "other"], 5, "other is a plan of zoo:mlp"),
        (["one", "--out", "one"], 2, "cannot write"),
        (["one", "--run", "one/plan.json"], 2, "is no record of a run"),
    ],
)
def test_what_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert cli.main(["report", *arguments]) == code
    assert words in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_log_of_another_plan_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"plan_hash": "0" * 16}) + "\n")
    assert cli.main(["report", str(folder / "one"), "--run", str(log)]) == 2
    assert "has no run of this plan" in capsys.readouterr().err


@pytest.fixture(scope="module")
def beside(folder: Path) -> Path:
    """A plan with what other devices cost beside it."""
    command = ["plan", "zoo:mlp", "--cluster", "1x2xH100,2xA100-80GB", "--method", "data_parallel"]
    assert cli.main([*command, "--pareto", "--out", str(folder / "front")]) == 0
    return folder / "front"


def test_what_other_devices_cost_is_drawn_with_the_plan(
    beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = json.loads((beside / "front.json").read_text(encoding="utf-8"))
    for path in (beside, beside / "plan.json"):
        capsys.readouterr()
        assert cli.main(["report", str(path), "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        assert plan["front"]["rows"] == saved["rows"]
        assert plan["front"]["unit"] == "sample"


def test_a_front_of_another_plan_is_none_of_this_one(
    beside: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes((folder / "two" / "plan.json").read_bytes())
    (tmp_path / "front.json").write_bytes((beside / "front.json").read_bytes())
    assert cli.main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["front"] is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "parloom.front", "version": 2}', '{"rows": 1}']
)
def test_a_damaged_front_is_named(
    text: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes((folder / "one" / "plan.json").read_bytes())
    (tmp_path / "front.json").write_text(text)
    assert cli.main(["report", str(tmp_path), "--json"]) == 2
    assert f"cannot read {tmp_path / 'front.json'}" in capsys.readouterr().err


LAB = """\
name: lab
join: {name: Ethernet, bandwidth: 25Gbit/s}
parts:
  - {name: old, device: V100, levels: [{name: NVLink2, size: 2, bandwidth: 150GB/s}]}
  - {name: new, device: A100, levels: [{name: NVLink3, size: 2, bandwidth: 300GB/s}]}
"""


def test_a_mixed_cluster_has_the_limits_and_the_links_of_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.yaml").write_text(LAB, encoding="utf-8")
    asked = ["--cluster", str(tmp_path / "lab.yaml"), "--batch", "4096", "--microbatches", "4"]
    plan = ["plan", "zoo:mlp", *asked, "--method", "whale", "--out", str(tmp_path / "plan")]
    assert cli.main(plan) == 0
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "plan"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    limits = {process["limit_bytes"] for process in found["memory"]["processes"]}
    assert limits == {16 * 10**9, 80 * 10**9}
    assert found["summary"]["limit_bytes"] in limits
    network = found["network"]
    assert [part["device"] for part in network["parts"]] == ["V100-SXM2-16GB", "A100-SXM4-80GB"]
    busy = {level["name"]: level["busy_s"] for level in network["levels"]}
    assert busy.keys() == {"NVLink2", "NVLink3", "Ethernet"}
    assert busy["Ethernet"] > 0


def test_microbatches_by_themselves_make_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of them have as much to do as their batch has at once."""
    found = []
    for flags in ([], ["--microbatches", "4", "--batch-semantics", "microbatch"]):
        assert cli.main([*PLAN, "--batch", "64", *flags, "--out", str(tmp_path / "plan")]) == 0
        capsys.readouterr()
        assert cli.main(["report", str(tmp_path / "plan"), "--json"]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        found.append(plan["summary"])
    whole, apart = found
    assert apart["model_flops"] == pytest.approx(whole["model_flops"], rel=0.01)
    assert (apart["samples"], whole["samples"]) == (64, 64)
    assert apart["mfu"] * apart["step_s"] == pytest.approx(whole["mfu"] * whole["step_s"], rel=0.01)
