"""One GPU: predicted against real steps and memory, beside the unmodified model in plain PyTorch.

    python benchmarks/one_gpu.py [--device H100] [--cases gpt2,llama,..] [--json FILE]

Every case is planned for one device, predicted from the data sheet and again after a calibration
with all plans, then trained for some steps: its generated program, the model in plain PyTorch, and
the program in two stages of four microbatches with gradients of weights made with the others or
apart. A step is the median of ten, in brackets until the processor is through. Memory is the most
that tensors take (`torch.cuda.max_memory_allocated`).
"""

import argparse
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import report
from torch import Tensor, nn

from parloom import api, zoo
from parloom.capture.load import cast_batch, cast_model
from parloom.execute import calibrate
from parloom.ir.factors import factorize
from parloom.ir.lower_stages import lower_stages
from parloom.ir.mesh import Mesh
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.plan import Action, Plan, Stage
from parloom.ir.stages import stage_items
from parloom.ir.text import parse_graph

Built = tuple[nn.Module, dict[str, Tensor]]
HERE = Path(__file__).resolve()
STEPS, WARM_UP = 10, 3
LEAST_S = 0.03  # each operator is measured for so long
MICROBATCHES = 4
SIDES = ("parloom", "torch", "two stages", "two stages, W apart")


def _zoo(name: str, **sizes: Any) -> Built:
    torch.manual_seed(0)
    return zoo.build(name, **sizes)


def gpt2() -> Built:
    return _zoo("gpt", batch=8, seq=1024, vocab=50304, width=768, depth=12, heads=12)


def llama() -> Built:
    return _zoo(
        "llama",
        batch=4,
        seq=2048,
        vocab=32000,
        width=2048,
        depth=16,
        heads=32,
        groups=8,
        inner=8192,
    )


def bert() -> Built:
    return _zoo("bert_large", batch=16, seq=512, dropout=0.0)


def resnext() -> Built:
    return _zoo("resnext50", batch=64)


def wide_resnet() -> Built:
    return _zoo("wide_resnet", batch=64)


def unet() -> Built:
    return _zoo("unet", batch=128, dropout=0.0)


def dit() -> Built:
    return _zoo("dit_xl", batch=32)


def dlrm() -> Built:
    return _zoo("dlrm", batch=16384, rows=1_000_000, hidden=1024)


def candle_uno() -> Built:
    return _zoo("candle_uno", batch=4096)


def mmt() -> Built:
    return _zoo("mmt", batch=16)


def gnmt() -> Built:
    return _zoo("gnmt", batch=64, dropout=0.0)


# Each with the dtype that its parameters and its batch are cast to.
CASES: dict[str, tuple[Callable[[], Built], str | None]] = {
    "gpt2": (gpt2, "bf16"),
    "llama": (llama, "bf16"),
    "bert": (bert, "bf16"),
    "dit": (dit, "bf16"),
    "mmt": (mmt, "bf16"),
    "resnext": (resnext, "bf16"),
    "wide_resnet": (wide_resnet, None),
    "unet": (unet, "bf16"),
    "dlrm": (dlrm, None),
    "candle_uno": (candle_uno, None),
    "gnmt": (gnmt, None),
}


def plan_of(name: str, folder: Path, cluster: str) -> None:
    """Write the plan of a case."""
    made, dtype = CASES[name]
    plan = api.plan(f"{HERE}:{made.__name__}", cluster=cluster, dtype=dtype, method="data_parallel")
    api.save(plan, folder / name)


def built(name: str, device: torch.device) -> Built:
    """Model and batch of a case on a device."""
    made, dtype = CASES[name]
    model, batch = made()
    wanted = torch.bfloat16 if dtype else torch.float32
    cast_model(model, wanted)
    return model, {k: v.to(device) for k, v in cast_batch(batch, wanted).items()}


def two_stages(plan: Plan, apart: bool) -> Plan | None:
    """The plan in two stages on its device; None where no four microbatches can be cut."""
    graph = parse_graph(plan.graph)
    if MICROBATCHES not in legal_microbatches(factorize(graph)).counts:
        return None
    items = stage_items(graph)
    halves = items[: len(items) // 2], items[len(items) // 2 :]
    stages = tuple(Stage(half, (range(1),), Mesh(())) for half in halves)
    actions = tuple(_listed(apart))
    chosen = replace(
        plan.decisions, stages=stages, actions=(actions,), num_microbatches=MICROBATCHES,
        schedule="listed", nodes=(), parameters=(),
    )  # fmt: skip
    lower_stages(graph, chosen)
    return replace(plan, decisions=chosen)


def _listed(apart: bool) -> Iterator[Action]:
    for microbatch in range(MICROBATCHES):
        kinds = [("F", 0), ("F", 1), ("B", 1), ("W", 1), ("B", 0), ("W", 0)]
        yield from (Action(k, microbatch, s) for k, s in kinds if apart or k != "W")
    yield from (Action("REDUCE"), Action("STEP"), Action("GATHER"))


def stepper(name: str, side: str, folder: Path, device: torch.device) -> Callable[[], Any] | None:
    """What one step of a side runs."""
    model, batch = built(name, device)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, lr=1e-4)

    if side == "torch":
        model.to(device)
        made = optimizer(model.parameters())

        def eager() -> None:
            made.zero_grad()
            result = model(**batch)
            (result[0] if isinstance(result, tuple) else result).backward()
            made.step()

        return eager
    plan: Plan | None = api.load(folder / name)
    assert plan is not None
    if side != "parloom":
        plan = two_stages(plan, apart=side.endswith("apart"))
    if plan is None:
        return None
    trainer = api.parallelize(model, plan, optimizer=optimizer)
    return lambda: trainer.step(batch)


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Seconds of a step and the most that tensors take, of all sides of a case.

    Cases are built side by side, and take turns on the device.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    for side in SIDES:
        step = stepper(name, side, folder, device)
        if step is not None:
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found[side] = timed(step, device)
        del step
        gc.collect()
        torch.cuda.empty_cache()
    return found


def timed(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """The median of steps, until the processor is through and until all is done; the most that
    tensors took.
    """
    seconds, of_host = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + STEPS):
        _wait(device)
        began = time.perf_counter()
        step()
        of_host.append(time.perf_counter() - began)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    counted = seconds[WARM_UP:]
    spread = (max(counted) - min(counted)) / 2 / statistics.median(counted)
    host_s = statistics.median(of_host[WARM_UP:])
    return {
        "seconds": statistics.median(counted),
        "spread": spread,
        "host_s": host_s,
        "bytes": peak,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def predicted(name: str, folder: Path) -> dict[str, float]:
    """What is expected of a case, from the data sheet and as calibrated."""
    plan, row, calibration = api.load(folder / name), {}, folder / "calibration.json"
    known = calibration if calibration.exists() else None
    for how, file in (("sheet", None), ("calibrated", known)):
        timeline = api.simulate(plan, file)
        row[f"{how}_s"], row[f"{how}_bytes"] = timeline.step_s, float(timeline.peak_bytes)
    for side in SIDES[2:]:
        staged = two_stages(plan, apart=side.endswith("apart"))
        if staged is not None:
            timeline = api.simulate(staged, known)
            row[f"{side}_s"], row[f"{side}_bytes"] = timeline.step_s, float(timeline.peak_bytes)
    return row


def calibrated(names: list[str], folder: Path) -> None:
    """Measure the device with the operators of all cases."""
    pcgs = [pcg for n in names for pcg in _pcgs(api.load(folder / n))]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    made = calibrate.calibrate(pcgs, None, say, LEAST_S)
    api.save_calibration(made, folder / "calibration.json")


def _pcgs(plan: Plan) -> Iterator[Any]:
    yield from lower_stages(parse_graph(plan.graph), plan.decisions).pcgs


def alone(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a part of this benchmark in a process of its own."""
    command = [sys.executable, str(HERE), "--folder", str(folder), *words]
    return subprocess.Popen(command, stdout=sys.stderr)


def line(row: dict[str, Any]) -> str:
    cells = [row["case"]]
    for how in ("sheet", "calibrated"):
        cells.append(f"{1e3 * row.get(f'{how}_s', 0):.1f}")
    for side in SIDES:
        own = row.get(side) or {}
        cells.append(
            f"{1e3 * own['seconds']:.1f} ±{own['spread']:.0%} ({1e3 * own['host_s']:.1f})"
            if own
            else "-"
        )
    cells += [f"{1e3 * row[f'{s}_s']:.1f}" if f"{s}_s" in row else "-" for s in SIDES[2:]]
    cells += [f"{row.get('sheet_bytes', 0) / 1e9:.2f}"]
    cells += [f"{(row.get(s) or {}).get('bytes', 0) / 1e9:.2f}" for s in SIDES]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", default=None)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("plan", "calibrate", "measure", "predict"),
                        help=argparse.SUPPRESS)  # fmt: skip
    args = parser.parse_args()
    names, cluster = args.cases.split(","), f"1x{args.device}"
    if args.part:
        return part(args.part, names, args.folder, cluster)
    with tempfile.TemporaryDirectory(prefix="parloom-gpu-") as temporary:
        return compared(names, Path(temporary), args)


def part(which: str, names: list[str], folder: Path, cluster: str) -> int:
    """What a process of its own does."""
    if which == "plan":
        plan_of(names[0], folder, cluster)
    elif which == "calibrate":
        calibrated(names, folder)
    else:
        row = (measured if which == "measure" else predicted)(names[0], folder)
        (folder / f"{names[0]}.{which}").write_text(json.dumps(row), encoding="utf-8")
    return 0


def compared(names: list[str], folder: Path, args: argparse.Namespace) -> int:
    """Plan, measure, calibrate, predict and print all cases."""
    rows: dict[str, dict[str, Any]] = {name: {"case": name} for name in names}

    def in_parallel(which: str) -> None:
        started = {
            name: alone(folder, "--device", args.device, "--part", which, "--cases", name)
            for name in rows
        }
        for name, process in started.items():
            if process.wait():
                rows.pop(name)
            elif which != "plan":
                found = (folder / f"{name}.{which}").read_text(encoding="utf-8")
                rows[name] |= json.loads(found)
                print(line(rows[name]), flush=True)
                report("one_gpu", list(rows.values()), args.json)

    heads = ["case", "sheet ms", "calibrated ms", *(f"{s} ms" for s in SIDES)]
    heads += [*(f"predicted: {s}" for s in SIDES[2:]), "predicted GB"]
    heads += [f"{side} GB" for side in SIDES]
    in_parallel("plan")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    in_parallel("measure")
    began = time.monotonic()
    alone(folder, "--part", "calibrate", "--cases", ",".join(rows)).wait()
    print(f"calibrated in {time.monotonic() - began:.0f} s", file=sys.stderr)
    in_parallel("predict")
    return int(len(rows) < len(names))


if __name__ == "__main__":
    raise SystemExit(main())
