"""Launch files: written for every launcher, and those of torchrun and Slurm start a job."""

import os
import runpy
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import FileStore

from parloom import cli
from parloom.execute.files import read_plan
from parloom.execute.startup import Place, mismatch
from parloom.export.launch import TARGETS, job_of, launch_file
from parloom.ir.plan_json import plan_hash
from tests.forked import forked_ranks

SCRIPT = """
import os, torch, parloom
from parloom.zoo.mlp import build
torch.manual_seed(0)
model, batch = build()
trainer = parloom.parallelize(
    model, os.environ["PARLOOM_PLAN"], optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
)
result = trainer.step(batch)
if os.environ["RANK"] == "0":
    print("trained", float(result.loss), os.environ["WORLD_SIZE"], os.sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("launch")
    (found / "train.py").write_text(SCRIPT)
    clusters = {"two": ("2x2xcpu", 4), "one": ("4xcpu", 4), "gpus": ("2x8xH100", 16)}
    for name, (cluster, count) in clusters.items():
        command = ["plan", "zoo:mlp", "--cluster", cluster, "--method", "data_parallel"]
        command += ["--devices", str(count), "--optimizer", "sgd", "--out", str(found / name)]
        assert cli.main(command) == 0
    return found


def exported(folder: Path, plan: str, to: str, *script: str) -> Path:
    command = ["export", str(folder / plan), "--to", to, "--out", str(folder / plan / "launch")]
    assert cli.main([*command, "--", str(folder / "train.py"), *script]) == 0
    return folder / plan / "launch" / TARGETS[to]


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def free_port() -> str:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return str(own.getsockname()[1])


def test_torchrun_starts_four_ranks(folder: Path) -> None:
    file = exported(folder, "one", "torchrun", "--data", "a b; 'c'")
    command = ["bash", str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 1
    assert """4 ['--data', "a b; 'c'"]""" in done.stdout


@pytest.fixture
def slurm(folder: Path, tmp_path: Path) -> dict[str, str]:
    """An environment in which `srun` starts its command once for each of two nodes, here."""
    stubs = {
        "scontrol": "echo 127.0.0.1; sleep 0.1; seq 20000",  # more than a pipe holds
        "srun": """
for node in 0 1; do SLURM_NODEID=$node "$@" & pids[$node]=$!; done
code=0; for pid in "${pids[@]}"; do wait $pid || code=$?; done; exit $code""",
    }
    for name, text in stubs.items():
        file = tmp_path / name
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    given = environment(
        SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[0-1]",
        PARLOOM_PORT=free_port(),
    )  # fmt: skip
    return given | {"PATH": f"{tmp_path}{os.pathsep}{given['PATH']}"}


@pytest.mark.slow
def test_slurm_starts_two_nodes(folder: Path, slurm: dict[str, str]) -> None:
    file = exported(folder, "two", "slurm")
    command = ["bash", str(file)]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 1
    assert " 4 []" in done.stdout


@pytest.mark.slow
def test_other_numbers_of_ranks_are_one_message(folder: Path, slurm: dict[str, str]) -> None:
    file = exported(folder, "two", "slurm")
    text = file.read_text().replace("--nproc-per-node=2", "--nproc-per-node=1")
    file.write_text(text)
    command = ["bash", str(file)]
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count("the plan is for 4 ranks") == 1, done.stderr


@pytest.mark.parametrize("to", ["k8s", "skypilot"])
@pytest.mark.parametrize("plan", ["two", "gpus"])
def test_yaml_is_yaml(folder: Path, plan: str, to: str) -> None:
    found = yaml.safe_load(exported(folder, plan, to, "--name", "a: 'b' \"c\"").read_text())
    size = 8 if plan == "gpus" else 2
    if to == "k8s":
        trainer = found["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, size)
        assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert trainer["command"][2].endswith("""--name 'a: '"'"'b'"'"' "c"'""")
    else:
        assert found["num_nodes"] == 2
        wanted = {"accelerators": "H100:8"} if plan == "gpus" else {"cpus": "2+"}
        assert found["resources"] == wanted
        assert f"--nproc-per-node={size}" in found["run"]


def test_ray_is_python(folder: Path) -> None:
    text = exported(folder, "gpus", "ray").read_text()
    compile(text, "ray_train.py", "exec")
    assert "num_workers=16" in text


@pytest.mark.parametrize("other", ["one", "two"])
def test_workers_of_ray_compare_their_plans_before_the_script(
    folder: Path, tmp_path: Path, other: str
) -> None:
    """Its file with a stand-in for ray, whose workers are in a process group before they train."""
    (tmp_path / "script.py").write_text("print('script')\n", encoding="utf-8")
    file = exported(folder, "one", "ray")
    file.write_text(file.read_text().replace(str(folder / "train.py"), f"{tmp_path}/script.py"))

    def work(rank: int) -> int:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        for name in ("ray", "ray.train", "ray.train.torch"):
            module = ModuleType(name)
            module.ScalingConfig = None  # type: ignore[attr-defined]
            sys.modules[name] = module
        store = FileStore(str(tmp_path / "store"), 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        found = runpy.run_path(str(file))
        train = found["train"]
        if rank == 3:
            train.__globals__["PLAN"] = str(folder / other)
        try:
            train()
        except RuntimeError as error:
            print(error)
            return 1
        return 0

    ended = forked_ranks(work, 4, 60)
    is_same = other == "one"
    assert [code for code, *_ in ended] == [0 if is_same else 1] * 4, ended
    assert sum("script\n" in out for _, out, _ in ended) == 4 * is_same
    assert ("rank 3" in ended[0][2]) == (not is_same)


def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(folder / "one"), "--to", "slrum"]) == 2
    assert "no target 'slrum'; did you mean 'slurm'?" in capsys.readouterr().err
    assert cli.main(["export", str(folder / "none"), "--to", "slurm"]) == 2


def test_names_are_quoted(folder: Path) -> None:
    plan = read_plan(folder / "one" / "plan.json")
    job = job_of(plan, "a $(b)/plan.json", ("c; d.py",))
    for to in ("slurm", "torchrun"):
        _, text = launch_file(to, job)
        assert "PARLOOM_PLAN='a $(b)/plan.json'" in text
        assert "'c; d.py'" in text


def places(folder: Path, sizes: list[int]) -> list[Place]:
    """Ranks of nodes of these sizes."""
    own = plan_hash(read_plan(folder / "gpus" / "plan.json"))
    nodes = [(node, size) for node, size in enumerate(sizes) for _ in range(size)]
    return [
        Place(rank, own, "1", f"n{node}", node, size) for rank, (node, size) in enumerate(nodes)
    ]


def test_which_ranks_fit_a_plan(folder: Path) -> None:
    plan = read_plan(folder / "gpus" / "plan.json")
    assert mismatch(plan, places(folder, [8, 8])) == ""
    assert mismatch(plan, places(folder, [16])) == ""  # all on one machine: nothing is apart
    assert "is for 16 ranks" in mismatch(plan, places(folder, [8, 7]))
    assert "ranks 0 to 7 to be on one node of 8" in mismatch(plan, places(folder, [4, 8, 4]))
    assert "ranks 8 to 15" in mismatch(plan, places(folder, [8, 4, 4]))
    told = places(folder, [8, 8])
    other = [*told[:9], replace(told[9], plan="f" * 16), *told[10:]]
    assert "rank 9 (node 1, n1) has plan ffffffffffffffff" in mismatch(plan, other)
    other = [*told[:9], replace(told[9], version="2"), *told[10:]]
    assert "rank 9 (node 1, n1) has parloom 2" in mismatch(plan, other)
