"""The command line: exit codes, what goes to stdout and stderr, and every refusal's text.

The main path is a fake here: these tests are about the command line alone, and import no torch.
"""

import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import parloom
from parloom import cli, errors
from parloom.api import check_asked
from parloom.comparators.baselines import data_parallel
from parloom.cost.calibration import calibration_to_json
from parloom.cost.holdings import Holding
from parloom.execute.files import check_file, check_folder, read_plan, write_atomic
from parloom.ir.expected import Alternative, Constraint, Status
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_to_json
from parloom.ir.text import print_graph
from parloom.report.shortage import Change, Shortage, shortage_document, shortage_text
from parloom.report.words import INTERRUPTED
from tests.unit.graphs import cluster, perceptron
from tests.unit.test_calibration import MADE
from tests.unit.test_plan_json import example


@dataclass(frozen=True)
class FakeReport:
    """As much of a verification report as the command line reads."""

    passed: bool
    first: str = ""
    worst_error: float = 0.0

    def __str__(self) -> str:
        return "PASS" if self.passed else f"FAIL: first tensor that differs: {self.first}"


class FakeApi(types.ModuleType):
    """Stands in for `parloom.api`; every test may replace one function."""

    def __init__(self) -> None:
        super().__init__("parloom.api")
        self.asked: dict[str, Any] = {}
        self.report = FakeReport(True)
        self.fault: BaseException | None = None
        self.nothing_fits: errors.InfeasibleError | None = None
        self.capture_s = 0.0
        self.notes: tuple[str, ...] = ()
        self.status = Status.COMPLETE
        self.constraints: tuple[Constraint, ...] = ()
        self.alternatives = example().alternatives
        self.check_asked = check_asked

    def capture(self, model: str, **asked: Any) -> str:
        self.asked = {"model": model, **asked}
        asked["progress"]("captured 12 operators")
        if self.fault:
            raise self.fault
        time.sleep(self.capture_s)
        return "captured"

    def search(self, captured: str, **asked: Any) -> Plan:
        assert captured == "captured"
        self.asked |= asked
        if self.nothing_fits:
            raise self.nothing_fits
        graph = perceptron(batch=6)
        (decisions,) = data_parallel(graph, cluster(6))
        text = print_graph(graph)
        found = replace(example(), cluster=asked["cluster"], graph=text, decisions=decisions)
        found = replace(found, alternatives=self.alternatives)
        return replace(found, notes=self.notes, status=self.status, constraints=self.constraints)

    def check_gap(self, plan: Plan, allowed: float | None) -> None:
        if allowed is not None:
            raise errors.GapError(f"the gap is 0.5, --require-gap is {allowed:g}")

    def save(self, plan: Plan, out: Path) -> dict[str, Path]:
        program = write_atomic(out / "program.py", "PROGRAM = None\n")
        return {"plan": write_atomic(out / "plan.json", plan_to_json(plan)), "program": program}

    def load(self, path: Path) -> Plan:
        return read_plan(path)

    def verify(self, plan: Plan, *, shrink: bool, progress: Callable[[str], None]) -> FakeReport:
        progress(f"verifying, shrink={shrink}")
        return self.report

    def explain(self, plan: Plan, **asked: Any) -> types.SimpleNamespace:
        self.asked = asked
        asked["progress"]("playing")
        if self.fault:
            raise self.fault
        return types.SimpleNamespace(document={"step_s": 1.0}, screen="explained")

    def run(self, path: Path, argv: list[str], **_: Any) -> int:
        self.asked = {"argv": argv}
        return 3


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setitem(sys.modules, "parloom.api", fake)
    monkeypatch.setattr(parloom, "api", fake, raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def plan_file(folder: Path) -> str:
    return str(write_atomic(folder / "plan.json", plan_to_json(example())))


def flat(text: str) -> str:
    """Panels wrap: compare words, not lines."""
    return " ".join(text.replace("│", " ").split())


def test_plan_prints_a_summary_and_saves(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--memory", "2GiB"]) == 0
    result = capsys.readouterr()
    for text in (
        "zoo:gpt on 6xcpu (6 x cpu): fsdp",
        "axis data over 6 devices (loopback) splits samples in 5 operators",
        "every device stores all weights, with their gradients and optimizer state",
        "300 ms (from data sheets, not calibrated: compare plans with it, not",
        "alternatives",
        "links as usual",
        "next: parloom verify runs/",
        "then: parloom run runs/",
        "why:  parloom explain runs/",
    ):
        assert text in result.out, text
    progress = result.err.splitlines()
    assert progress[0] == "captured 12 operators"
    assert re.fullmatch(r"captured in \d+\.\d s, searched in \d+\.\d s", progress[1])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("zoo-gpt-6xcpu-fsdp-")
    assert sorted(p.name for p in folder.iterdir()) == ["plan.json", "program.py"]
    assert api.asked["memory"] == "2GiB"
    assert api.asked["dtype"] is None  # the model is left as it is
    assert api.asked["method"] == "auto"


def test_the_next_command_takes_the_calibration(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my cpu.json"
    file.write_text(calibration_to_json(MADE), encoding="utf-8")
    asked = ["plan", "zoo:gpt", "--cluster", "6xcpu", "--out", "here"]
    assert cli.main(asked) == 0
    assert "why:  parloom explain here/plan.json\n" in capsys.readouterr().out
    assert cli.main([*asked, "--calibration", "my cpu.json"]) == 0
    why = "why:  parloom explain here/plan.json --calibration 'my cpu.json'\n"
    assert why in capsys.readouterr().out


def test_plan_json_is_one_document_with_the_promised_keys(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--json", "--out", "here"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) >= {
        "step_s", "bound_s", "gap", "solver_gap", "peak_bytes", "memory", "capture_s", "search_s",
        "method", "mesh", "stages", "num_microbatches", "schedule", "alternatives", "assumptions",
        "plan",
    }  # fmt: skip
    assert document["memory"] == [{"weights": 7, "gradients": 8}]
    assert document["gap"] is None
    assert document["alternatives"][0].keys() == {"name", "step_s", "peak_bytes", "fits"}
    assert document["plan"] == "here/plan.json"


def test_capture_and_search_are_timed_apart(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.capture_s = 0.25
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["capture_s"] >= 0.25
    assert 0 <= document["search_s"] < 0.25


def test_what_is_asked_for_reaches_the_search_and_its_cost_the_screen(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = ["--pin", "up=n:x", "--pin", "mesh=3x2", "--forbid", "down=replicated"]
    api.constraints = (
        Constraint("--pin up=n:x", 0.25, 2**20),
        Constraint("--pin mesh=3x2", 0.1 + 0.2, 10**9),
    )
    arguments = ["plan", "zoo:gpt", "--cluster", "6xcpu", *pins, "--budget", "100"]
    assert cli.main(arguments) == 0
    result = capsys.readouterr()
    assert api.asked["pin"] == ["up=n:x", "mesh=3x2"]
    assert api.asked["forbid"] == ["down=replicated"]
    assert api.asked["budget"] == 100
    cost = "--pin up=n:x costs 50 ms (+20.0%): 300 ms and 954 MiB with it, 250 ms and 1 MiB without"
    assert cost in flat(result.out)
    assert "--pin mesh=3x2 costs nothing" in result.out
    assert cli.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["constraints"][0] == {
        "text": "--pin up=n:x", "without_step_s": 0.25, "without_peak_bytes": 2**20, "instead": "",
    }  # fmt: skip


def test_memory_is_shown_beside_the_limit(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.constraints = (Constraint("--memory 2GB", 0.25, 2**31),)
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--memory", "2GB"]) == 0
    assert "954 MiB of 1.86 GiB allowed (50.0%; --memory: the device has" in capsys.readouterr().out


def test_alternatives_that_no_word_tells_apart_are_one_row(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.alternatives = (
        Alternative("auto (x=2)", 0.5, 2**20, True),
        Alternative("auto (x=2)", 0.25, 2**21, True),
        Alternative("auto (x=2)", 0.125, 2**40, False),
        Alternative("fsdp", 0.75, 2**20, True),
    )
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu"]) == 0
    rows = capsys.readouterr().out.split("\nalternatives")[1].split("\n\n")[0].splitlines()[1:]
    assert [" ".join(row.split()) for row in rows] == [
        "auto (x=2), best of 2 250 ms -16.7% 2 MiB yes",
        "auto (x=2) 125 ms -58.3% 1 TiB no",
        "fsdp 750 ms +150.0% 1 MiB yes",
    ]
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["alternatives"]) == 4


def test_an_interrupted_search_keeps_its_plan_and_exits_130(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.notes, api.status = (f"auto: {INTERRUPTED}",), Status.INTERRUPTED
    assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--out", "here"]) == 130
    result = capsys.readouterr()
    assert "auto: interrupted; this is the best of what was found until then" in flat(result.out)
    assert Path("here/plan.json").exists()


def test_a_gap_that_is_too_large_keeps_the_plan_and_exits_6(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "zoo:gpt", "--cluster", "6xcpu", "--out", "here", "--require-gap", "0.1"]
    assert cli.main(arguments) == 6
    assert "error: the gap is 0.5, --require-gap is 0.1" in capsys.readouterr().err
    assert Path("here/plan.json").exists()


def test_sizes_are_in_units_that_fit_them() -> None:
    shortage = Shortage(2**20, "fsdp", 3 * 2**10, (("weights", 2**10),))
    text = shortage_text(shortage)
    assert "fits in 1 MiB per device\nthe smallest found, fsdp, needs 3 KiB at its peak:" in text
    assert "weights        1 KiB (33%)" in text


def test_what_does_not_fit_is_said_as_text_and_as_json(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    shortage = Shortage(
        2**30,
        "fsdp (data=4)",
        4 * 2**30,
        (("weights", 3 * 2**30),),
        "blocks.3: act (B0)",
        (Holding("weights", "*.up.weight", 3, 2**30),),
        2 * 2**30,
        (Change("--optimizer sgd", "no optimizer states", 0.5, 2**29, 0.125),),
    )
    api.nothing_fits = errors.InfeasibleError(shortage_text(shortage), shortage_document(shortage))
    arguments = ["plan", "zoo:gpt", "--cluster", "4xcpu"]
    assert cli.main(arguments) == 3
    result = capsys.readouterr()
    assert result.out == ""
    for line in (
        "error: no plan fits in 1 GiB per device; each one that is searched holds 2 GiB or more",
        "the smallest found, fsdp (data=4), needs 4 GiB at its peak, while blocks.3: act (B0)"
        " runs:",
        "  weights        3 GiB (75%)",
        "the largest tensors of it:",
        "  weights of *.up.weight x 3                   1 GiB (25%)",
        "what would fit, the cheapest first (a search of its own may find faster plans):",
        "  --optimizer sgd (no optimizer states): 500 ms a step, 512 MiB; 125 ms of a device for"
        " each sample",
    ):
        assert line in result.err.splitlines()
    assert cli.main([*arguments, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["infeasible"]
    assert found["least_bytes"] == 2 * 2**30
    assert found["smallest"]["memory"] == {"weights": 3 * 2**30}
    assert found["smallest"]["tensors"][0]["name"] == "*.up.weight"
    assert found["changes"] == [
        {"flags": "--optimizer sgd", "words": "no optimizer states", "step_s": 0.5,
         "peak_bytes": 2**29, "device_s_per_sample": 0.125}
    ]  # fmt: skip
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("afile/x", "cannot save in afile/x: afile is not a folder; choose another folder with"),
        ("afile", "cannot save in afile: afile is not a folder; choose another"),
        ("/dev/full", "cannot save in /dev/full: /dev/full is not a folder; choose another"),
        ("/proc/x", "cannot save in /proc/x: not writable (No such file or directory); choose"),
    ],
)
def test_out_is_checked_before_the_model_is_built(
    api: FakeApi, capsys: pytest.CaptureFixture[str], out: str, message: str
) -> None:
    Path("afile").write_text("")
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu", "--out", out]) == 2
    assert message in capsys.readouterr().err
    assert api.asked == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--pin", "mesh=3x2"],
            "--pin mesh=3x2: no such mesh; of one and two axes there are: x:4; x:2,y:2",
        ),
        (["--pin", "up=n:z"], "--pin up=n:z: no axis 'z'"),
        (["--forbid", "up=n:3"], "--forbid up=n:3: no axes make 3 devices; there are: 2, 4"),
    ],
)
def test_pins_are_held_against_the_cluster_before_the_model_is_built(
    api: FakeApi, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    asked = ["plan", "zoo:gpt", "--cluster", "4xcpu"]
    assert cli.main([*asked, *flags]) == 2
    assert message in capsys.readouterr().err
    assert api.asked == {}
    # What other methods call their axes, and what only a model can tell, is asked later.
    for others in ([*flags, "--method", "fsdp"], ["--pin", "mesh=2x2", "--pin", "no.such=n:y"]):
        assert cli.main([*asked, *others]) == 0
        assert api.asked["model"] == "zoo:gpt"


def test_checking_a_folder_leaves_none_behind(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_same_plan_same_folder_same_bytes(api: FakeApi, tmp_path: Path) -> None:
    arguments = ["plan", "zoo:gpt", "--cluster", "6xcpu"]
    assert cli.main(arguments) == 0
    (file,) = tmp_path.glob("runs/*/plan.json")
    before = file.read_bytes()
    assert cli.main(arguments) == 0
    assert list(tmp_path.glob("runs/*/plan.json")) == [file]
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "m", "--clustr", "4xcpu"], "No such option: --clustr (Possible options: --clus"),
        (["plna", "m"], "No such command 'plna'. Did you mean 'plan'?"),
        (["plan"], "Missing argument 'MODEL'"),
        (["scale"], "Missing argument 'MODEL|PLAN'"),
        (["plan", "m", "--cluster", "4xcpu", "--forbid", "pipelines"], "write --pin stages=1"),
        (["plan", "m", "--cluster", "2x8xH1000"], "unknown device 'H1000'; did you mean"),
        (["plan", "m", "--cluster", "lots"], "write nodes x devices x device as 2x8xH100"),
        (["plan", "m", "--cluster", "none.yaml"], "cannot read the cluster file none.yaml"),
        (["plan", "m", "--cluster", "4xcpu", "--memory", "70Gb"], "memory: '70Gb' is ambiguous"),
        (["plan", "m", "--cluster", "4xcpu", "--memory", "0GB"], "greater than zero"),
        (["plan", "m", "--cluster", "4xcpu", "--method", "fdsp"], "'fdsp'; did you mean 'fsdp'"),
        (["plan", "m", "--cluster", "4xcpu", "--dtype", "bf61"], "bf61"),
        (["plan", "m", "--cluster", "4xcpu", "--batch", "0"], "batch"),
        (["plan", "m", "--cluster", "4xcpu", "--budget", "0"], "budget"),
        (["plan", "m", "--cluster", "4xcpu", "--memory", "0GB"], "memory: must be greater"),
        (["plan", "m", "--cluster", "4xcpu", "--require-gap", "-1"], "require-gap"),
        (["plan", "m", "--cluster", "4xcpu", "--require-gap", "inf"], "require_gap"),
        (
            ["plan", "m", "--cluster", "4xcpu", "--method", "fsdp", "--require-gap", "1"],
            "require_gap: only --method auto proves a bound",
        ),
        (
            ["plan", "m", "--cluster", "4xcpu", "--method", "fsdp", "--budget", "10"],
            "budget: only auto, random, alpa, alpa_intra, flexflow, unity, sequential,"
            " taso, tensat, pet count work",
        ),
        (["plan", "m", "--cluster", "4xcpu", "--pin", "lm_head"], "write --pin NAME=LAYOUT"),
        (["plan", "m", "--cluster", "4xcpu", "--forbid", "a=b c"], "--forbid a=b c: 'b c' is no"),
        (["plan", "m", "--cluster", "4xcpu", "--allow", "int8"], "known: quantized-communication"),
        (["cluster", "shwo"], "No such command 'shwo'. Did you mean 'show'?"),
        (["verify", "none.json"], "cannot read the plan none.json: No such file"),
    ],
)
def test_bad_usage(
    api: FakeApi, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(arguments) == 2
    result = capsys.readouterr()
    assert message in flat(result.err)
    assert result.out == ""
    assert "Traceback" not in result.err


def test_batch_semantics_are_asked_for_by_name(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "zoo:gpt", "--cluster", "4xcpu", "--microbatches", "2", "--batch-semantics"]
    assert cli.main([*command, "microbatch"]) == 0
    assert api.asked["batch_semantics"] == "microbatch"
    assert api.asked["microbatches"] == 2
    assert cli.main([*command, "microbach"]) == 2
    assert "no semantics 'microbach'; did you mean 'microbatch'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch-norm", "local"],
    ],
)
def test_later_flags_are_not_yet(
    api: FakeApi, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu", *flags]) == 2
    result = capsys.readouterr()
    assert result.err.startswith(f"error: not yet: {flags[0]}")
    assert api.asked == {}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (errors.InputError("batch of 7 does not divide by 4"), 2),
        (errors.InfeasibleError("nothing fits"), 3),
        (errors.CaptureError("data-dependent branch in model.rotary"), 4),
        (errors.FingerprintError("another model"), 5),
        (errors.GapError("gap"), 6),
        (errors.EqualityError("wte.weight differs"), 7),
        (errors.LaunchError("no backend"), 8),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    api: FakeApi, capsys: pytest.CaptureFixture[str], fault: BaseException, code: int
) -> None:
    api.fault = fault
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu"]) == code
    result = capsys.readouterr()
    assert result.out == ""
    last = result.err.splitlines()[-1]
    assert last == ("interrupted" if code == 130 else f"error: {fault}")
    assert not Path("runs").exists()


def test_traceback_only_with_v(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.fault = errors.InputError("bad batch")
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu", "-v"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_one_line_and_a_file(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.fault = ZeroDivisionError("inside\nthe planner")
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("internal error: ZeroDivisionError: inside. This is a bug")
    file = Path(line.split()[-1])
    text = file.read_text(encoding="utf-8")
    file.unlink()
    assert "Traceback" in text
    assert "zoo:gpt" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("flags", [["--version"], ["cluster", "show", "4xcpu"], ["--json"]])
def test_a_stdout_that_takes_nothing_is_no_bug(flags: list[str]) -> None:
    arguments = ["cluster", "show", "4xcpu", "--json"] if flags == ["--json"] else flags
    command = [sys.executable, "-m", "parloom", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE)
    said = b"error: cannot write the result to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")  # `parloom ... | head` is nobody's fault


def test_pipes_are_as_wide_as_columns_says_and_not_padded(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.constraints = (Constraint("--memory 2GB", 0.25, 2**31),)
    lines = {}
    for columns in ("", "60", "wide"):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["plan", "zoo:gpt", "--cluster", "6xcpu", "--out", "here"]) == 0
        lines[columns] = capsys.readouterr().out.splitlines()
        assert all(line == line.rstrip() for line in lines[columns])
    assert max(map(len, lines["60"])) <= 60 < max(map(len, lines[""])) <= 120
    assert lines["wide"] == lines[""]
    for name, size in (("weights", "7 B  0.0%"), ("gradients", "8 B  0.0%")):
        assert any(x.startswith(f"  {name} ") and x.endswith(size) for x in lines["60"])


def test_verify_passes_or_exits_7(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path)
    assert cli.main(["verify", path, "--shrink"]) == 0
    result = capsys.readouterr()
    assert result.out == f"PASS\nnext: parloom run {path} -- train.py\n"
    assert result.err == "verifying, shrink=True\n"
    api.report = FakeReport(False, "transformer.wte.weight")
    assert cli.main(["verify", path]) == 7
    failed = capsys.readouterr().out
    assert "transformer.wte.weight" in failed
    assert "next:" not in failed
    assert cli.main(["verify", path, "--json"]) == 7
    assert json.loads(capsys.readouterr().out)["first"] == "transformer.wte.weight"


def test_verify_refuses_damaged_plans(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(plan_file(tmp_path))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    assert cli.main(["verify", str(path)]) == 2
    assert "truncated" in capsys.readouterr().err
    path.write_text(whole.replace('"cluster": "6xcpu"', '"cluster": "7xcpu"'), encoding="utf-8")
    assert cli.main(["verify", str(path)]) == 2
    assert "6 devices are no part of 7xcpu; a plan uses 7, 1 of them" in capsys.readouterr().err
    path.write_text(whole.replace('"cluster": "6xcpu"', '"cluster": "6xcpux"'), encoding="utf-8")
    assert cli.main(["simulate", str(path)]) == 2
    assert f"{path}: cluster: unknown device 'cpux'" in capsys.readouterr().err
    path.write_text(whole.replace('"num_states": 2', '"num_states": 9'), encoding="utf-8")
    assert cli.main(["verify", str(path)]) == 2
    assert "adamw keeps 2 states of each weight, and the plan says" in capsys.readouterr().err
    path.write_text(whole.replace('"name": "adamw"', '"name": "lion"'), encoding="utf-8")
    assert cli.main(["verify", str(path)]) == 2
    assert "unknown optimizer 'lion'" in capsys.readouterr().err
    path.write_bytes(b"\x80\x04\x95planted")
    assert cli.main(["verify", str(path)]) == 2
    assert "never unpickles" in capsys.readouterr().err


def test_json_is_strict(api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.report = FakeReport(False, "w", float("inf"))
    assert cli.main(["verify", plan_file(tmp_path), "--json"]) == 7
    text = capsys.readouterr().out
    assert json.loads(text)["worst_error"] is None
    assert "Infinity" not in text


def test_explain_prints_a_screen_or_a_document(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path)
    assert cli.main(["explain", path, "head.weight", "--versus", "fsdp"]) == 0
    assert capsys.readouterr() == ("explained\n", "playing\n")
    asked = {key: api.asked[key] for key in ("name", "path", "versus", "calibration")}
    assert asked == {"name": "head.weight", "path": path, "versus": "fsdp", "calibration": None}
    assert cli.main(["explain", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"step_s": 1.0}
    api.fault = errors.FingerprintError("another model")
    assert cli.main(["explain", path, "--versus", "other.json"]) == 5
    assert cli.main(["explain", "none.json"]) == 2


def test_run_passes_arguments_and_the_exit_code_on(api: FakeApi, tmp_path: Path) -> None:
    path = plan_file(tmp_path)
    assert cli.main(["run", path, "--", "train.py", "--lr", "0.1", "-v"]) == 3
    assert api.asked["argv"] == ["train.py", "--lr", "0.1", "-v"]


def test_cluster_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "show", "2x8xH100"]) == 0
    shown = capsys.readouterr().out
    assert "2 nodes x 8 devices = 16 x H100-SXM5-80GB" in shown
    assert "450 GB/s" in shown
    assert "joins: so many devices, or groups of the level in the line above" in shown
    assert "neighbors" not in shown
    assert cli.main(["cluster", "show", "64xTPU-v4"]) == 0
    assert "bandwidth of a ring or line: to both neighbors together" in capsys.readouterr().out
    assert cli.main(["cluster", "show", "2x8xH100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_devices"] == 16
    assert cli.main(["cluster", "show", "--known"]) == 0
    assert "A100-SXM4-80GB" in capsys.readouterr().out
    file = tmp_path / "lab.yaml"
    file.write_text("device: H100\nlevels: [{name: a, size: 2, bandwith: 1GB/s}]\n")
    assert cli.main(["cluster", "check", str(file)]) == 2
    assert "lab.yaml:2:29: unknown key 'bandwith'; did you mean 'bandwidth'?" in (
        capsys.readouterr().err
    )
    assert cli.main(["cluster", "check", "4xcpu"]) == 0


@pytest.mark.parametrize("arguments", [[], ["cluster"]])
def test_no_command_is_help_and_an_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert "Usage" in said.out
    assert said.err == "error: no command was given; the help lists them\n"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"parloom {parloom.__version__}\n"
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    verbs = "plan verify run simulate explain calibrate cluster report export doctor"
    assert all(verb in shown for verb in verbs.split())


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys; from parloom.cli import main; code = main(['cluster', 'show', '4xcpu']); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


def test_write_atomic_puts_no_file_in_place_of_a_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(errors.InputError, match=r"pipe: it is no regular file"):
        write_atomic(pipe, "text")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("there", "kind"),
    [('{\n  "format": "parloom.plan",\n', "a plan"), ('{"plan_hash": "12", ', "the log of a run")],
)
def test_an_answer_never_takes_the_place_of_what_it_is_about(
    tmp_path: Path, there: str, kind: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(there, encoding="utf-8")
    for write in (lambda: write_atomic(path, "<!doctype html>"), lambda: check_file(path)):
        with pytest.raises(errors.InputError, match=f"file.json: {kind} is there, which would be"):
            write()
    assert path.read_text(encoding="utf-8") == there
    write_atomic(path, f"{there} newer")  # of one kind
    write_atomic(tmp_path / "report.html", "old")
    assert write_atomic(tmp_path / "report.html", "new").read_text(encoding="utf-8") == "new"


def test_a_page_has_a_place_before_it_is_made(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"format": "parloom.plan"}', encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for out, why in (
        ("plan.json", "a plan is there, which would be lost"),
        ("folder", "it is a folder"),
        ("plan.json/page.html", "plan.json is not a folder"),
    ):
        assert cli.main(["report", "plan.json", "--out", str(tmp_path / out)]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert "choose another file with --out" in said


def test_write_atomic_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomic(tmp_path / "deep" / "plan.json", "old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(errors.InputError, match=r"cannot write .*plan.json: No space left"):
        write_atomic(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_writing_where_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(errors.InputError, match="choose another folder with --out"):
        write_atomic(tmp_path / "runs" / "plan.json", "new")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(28, "No space left on device", "/x/y"), "No space left on device: '/x/y'"),
        (PermissionError(13, "Permission denied", "/x"), "Permission denied: '/x'"),
        (FileNotFoundError(2, "No usable temporary directory found"), "No usable temporary"),
        (MemoryError(), "memory ran out (MemoryError); ask for less"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 TB"), "memory ran out (Defa"),
    ],
    ids=str,
)
def test_what_the_system_refuses_is_no_bug(
    api: FakeApi, capsys: pytest.CaptureFixture[str], fault: Exception, said: str
) -> None:
    api.fault = fault
    assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu"]) == 8
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.slow
def test_nothing_can_be_written_anywhere(tmp_path: Path) -> None:
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "from parloom.__main__ import main; sys.exit(main())"
    )
    for verb in (["plan", "zoo:mlp", "--cluster", "2xcpu", "--out", str(tmp_path / "out")],):
        command = [sys.executable, "-c", program, *verb]
        done = subprocess.run(command, check=False, capture_output=True, cwd=tmp_path)
        assert done.returncode in (2, 8), done.stderr
        assert b"Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith(b"error: ")
        assert not list(tmp_path.rglob("*"))


def test_a_stderr_that_takes_nothing_stops_no_work() -> None:
    command = [sys.executable, "-m", "parloom", "cluster", "show", "9xnothing"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (2, b"")


def test_numbers_beyond_64_bits_are_told(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--seed", "--batch", "--seq", "--microbatches", "--budget"):
        assert cli.main(["plan", "zoo:gpt", "--cluster", "4xcpu", flag, "9" * 20]) == 2
        assert f"{flag[2:]}: must be at most" in capsys.readouterr().err
