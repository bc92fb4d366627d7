"""Predicted against measured passes of inference plans on CPU ranks, after `parloom calibrate`.

    python benchmarks/inference_latency.py [--models llama,gpt2,vit] [--ranks 1,2] [--launches 3]
                                           [--passes 8] [--methods pipeline] [--json F]
                                           [--testbed FOLDER [--rate 250mbit] [--cores 0.5]]

A case is a model, a method and a number of ranks of this machine, or with `--testbed` of hosts of
some of a core in the cluster in a box; "pipeline" is the plan of a stage on each that answers most
in a second. Its plans are made. Several times `parloom calibrate --plan ..` runs on as many ranks,
and then both of a plan's programs run, apart and as answers: prompts and all tokens after them. A
pass counts by its slowest rank, a launch by the median of its passes; the error is the median over
launches, each against the calibration before it. Memory of a machine that others use is faster at
one time than at another: the spread is that of the launches themselves. Run it where nothing else
runs: the load before each launch is in the table.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster_in_a_box import Bed
from cluster_rank import _slowest
from common import report
from torch import Tensor
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, ViTConfig

from parloom import api
from parloom.errors import InfeasibleError
from parloom.execute.files import read_plan
from parloom.execute.inference import lowered_programs
from parloom.execute.machine import machine_of
from parloom.execute.serve import server_of
from parloom.ir.graph import Graph
from parloom.ir.plan import Plan
from parloom.ir.text import parse_graph
from parloom.runtime import Server
from parloom.runtime.generation import DECODE, GENERATED, PREFILL

PIPELINE = "pipeline"
METHODS = ("data_parallel", "megatron", PIPELINE)
BATCH, PROMPT, TOKENS = 4, 64, 64
ANSWER = "answer"  # in the place of a program's name


def configs() -> dict[str, PretrainedConfig]:
    """Models whose passes take milliseconds on a core."""
    return {
        "llama": LlamaConfig(
            hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
            vocab_size=4096, architectures=["LlamaForCausalLM"],
        ),
        "gpt2": GPT2Config(
            n_embd=512, n_layer=4, n_head=8, vocab_size=4096, bos_token_id=1, eos_token_id=1,
            architectures=["GPT2LMHeadModel"],
        ),
        "vit": ViTConfig(
            hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6,
            image_size=96, architectures=["ViTForImageClassification"],
        ),
    }  # fmt: skip


def make_plans(
    folder: Path, model: str, ranks: int, methods: Sequence[str], cluster: str
) -> list[Path]:
    """Write the plans of a model for so many ranks; their folders."""
    spec = folder / model
    configs()[model].save_pretrained(spec)
    asked = {"seq": PROMPT, "new_tokens": TOKENS} if model != "vit" else {}
    captured = api.capture_inference(str(spec), batch=BATCH, **asked, progress=_say)  # type: ignore[arg-type]
    made = []
    for method in methods if ranks > 1 else METHODS[:1]:
        wanted: dict[str, Any] = {"method": method}
        if method == PIPELINE:
            wanted = {"pin": [f"stages={ranks}"], "objective": "throughput"}
        try:
            plan = api.search_inference(
                captured, cluster=cluster, devices=ranks, **wanted, progress=_say
            )
        except InfeasibleError as error:
            _say(f"{model} by {method} on {ranks}: {error}")
            continue
        made.append(folder / f"{model}-{method}-{ranks}")
        api.save(plan, made[-1])
    return made


def predicted(plan: Plan, calibration: Path) -> dict[str, float]:
    """Seconds of a pass of each program alone, and of an answer."""
    machine = machine_of(plan, calibration)
    played = {
        name: machine.play(program, plan.decisions, plan.optimizer)
        for name, program in lowered_programs(plan).items()
    }
    found = {name: timeline.step_s for name, timeline in played.items()}
    if PREFILL in found:
        found[ANSWER] = found[PREFILL] + (TOKENS - 1) * played[DECODE].period_s
    return found


def launched(ranks: int, *words: str) -> str:
    """What ranks on this machine print."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
        words = ("--no-python", sys.executable, *words)
    done = subprocess.run(
        [*command, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout


# One rank.


def timed(path: Path, passes: int) -> dict[str, list[float]]:
    """Seconds of the passes of each program, of the slowest rank."""
    plan = read_plan(path)
    server = server_of(plan, None)
    assert plan.inference is not None, "a plan for inference"
    found = {}
    for name in lowered_programs(plan):
        text = plan.inference.prefill_graph if name == PREFILL else plan.graph
        batch = _batch(parse_graph(text))
        found[name] = _times(partial(server.run, name, batch), passes)
        if name == PREFILL:  # an answer is many passes
            found[ANSWER] = _times(partial(_answer, server, batch["input_ids"]), passes // 4)
    return found


def _answer(server: Server, prompts: Tensor) -> None:
    server.begin_tokens(prompts, TOKENS).wait()


def _times(run: Callable[[], object], passes: int) -> list[float]:
    """Seconds of each of several runs after one to warm up, of the slowest rank."""
    times = []
    for index in range(1 + passes):
        if dist.is_initialized():
            dist.barrier()
        started = time.perf_counter()
        run()
        if index >= 1:
            times.append(time.perf_counter() - started)
    return _slowest(times) if dist.is_initialized() else times


def _batch(graph: Graph) -> dict[str, Tensor]:
    """Tokens, images and the position of a token."""
    found = {}
    for entry in graph.of_kind("batch"):
        spec = entry.value.spec
        dtype = getattr(torch, spec.dtype)
        drawn = torch.rand(spec.shape) if spec.is_float else torch.randint(0, 4096, spec.shape)
        found[entry.target] = drawn.to(dtype)
        if entry.target == GENERATED:
            found[entry.target] = torch.tensor(1)
    return found


def run_rank(paths: list[Path], passes: int) -> None:
    """Time all plans; rank 0 prints a line for each."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    for path in paths:
        times = timed(path, passes)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("RESULT " + json.dumps({"plan": str(path), "seconds": times}), flush=True)
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in cluster_rank.py


# The table.


def rows_of(
    folder: Path, model: str, ranks: int, args: argparse.Namespace, run: Callable[..., str]
) -> list[dict[str, Any]]:
    """All plans of a model on so many ranks, which `run` starts."""
    cluster = f"{ranks}x1xcpu" if args.testbed else f"{ranks}xcpu"
    plans = make_plans(folder, model, ranks, args.methods.split(","), cluster)
    given = [word for path in plans for word in ("--plan", str(path))]
    here, passes = str(Path(__file__).resolve()), str(args.passes)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    loads = []
    for index in range(args.launches):
        loads.append(os.getloadavg()[0])
        calibration = folder / f"{model}-{ranks}-{index}.json"
        run("-m", "parloom", "calibrate", "--cluster", cluster, "--out", str(calibration), *given)
        printed = run(here, "--passes", passes, "--time", *map(str, plans))
        found = [json.loads(line[7:]) for line in printed.splitlines() if line[:7] == "RESULT "]
        for row in found:
            expected = predicted(api.load(Path(row["plan"])), calibration)
            for name, times in row["seconds"].items():
                pair = expected[name], statistics.median(times)
                pairs.setdefault((Path(row["plan"]).name, name), []).append(pair)
    return [
        {
            "plan": plan, "ranks": ranks, "program": name,
            "predicted_s": statistics.median(seconds for seconds, _ in own),
            "measured_s": statistics.median(took for _, took in own),
            "error": statistics.median(math.log(seconds / took) for seconds, took in own),
            "spread": math.log(max(took for _, took in own) / min(took for _, took in own)),
            "pairs": own, "loads": loads,
        }
        for (plan, name), own in pairs.items()
    ]  # fmt: skip


@contextmanager
def started(ranks: int, args: argparse.Namespace) -> Iterator[Callable[..., str]]:
    """Runs a Python command on so many ranks: what they print."""
    if args.testbed is None:
        yield partial(launched, ranks)
        return
    with Bed(
        args.testbed,
        "latency",
        args.rate,
        ranks,
        cores=args.cores,
        burst=0.0,
        period_us=args.period_us,
    ) as bed:
        yield partial(bed.run, sys.executable)


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['plan']} | {row['program']} | {1e3 * row['predicted_s']:.2f} ms |"
        f" {1e3 * row['measured_s']:.2f} ms | {row['error']:+.1%} | {row['spread']:.1%} |"
        f" {max(row['loads']):.1f} |"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="llama,gpt2,vit")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--methods", default=",".join(METHODS), help="of plans for several ranks")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--time", type=Path, nargs="+", help="of a rank: the plans to time")
    parser.add_argument("--testbed", type=Path, help="folder of testbed.py")
    parser.add_argument("--rate", default="250mbit", help="of links in the box")
    parser.add_argument("--cores", type=float, default=0.5, help="of each host in the box")
    parser.add_argument("--period-us", type=int, default=2000, help="of a host's quota in the box")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    if args.time:
        run_rank(args.time, args.passes)
    torch.set_num_threads(1)
    table: list[dict[str, Any]] = []
    print("| plan | program | predicted | measured | log error | spread of launches | load |")
    print("|" + "---|" * 7)
    with tempfile.TemporaryDirectory(prefix="parloom-inference-") as folder:
        for ranks in map(int, args.ranks.split(",")):
            with started(ranks, args) as run:
                for model in args.models.split(","):
                    for row in rows_of(Path(folder), model, ranks, args, run):
                        table.append(row)
                        print(_line(row), flush=True)
    errors = sorted(abs(row["error"]) for row in table)
    found = {
        "rows": len(errors),
        "median_abs_log_error": statistics.median(errors),
        "worst": errors[-1],
    }
    print(json.dumps(found))
    report("inference_latency", [*table, found], args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
