"""`auto` with pipelines against every method that makes pipelines, in one cost model.

    PYTHONPATH=. python benchmarks/pipelines_compared.py [--cases gpt,..] [--methods auto,alpa]
        [--json FILE]

For each case and method: the predicted step of the best plan that fits, its stages, and CPU seconds
of the search; each method uses as many devices and microbatches as it likes. Rows that the file has
of the same revision are not made again. Methods other than `auto` are given ten minutes. Exit code
1 where a method is faster than `auto`, or where a plan is below the bound of `auto`.

`candle_uno`, `dlrm` and `mmt` on 4 to 32 V100 are the models of GraphPipe, with batches that grow
with the cluster; mixtures of experts and Wide-ResNets have the sizes of Alpa (Zheng et al., OSDI
2022, table 4, and its benchmark/alpa/suite_auto_moe.py, suite_wresnet.py).
"""

import argparse
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import report, reported, revision
from torch import nn

from parloom import api
from parloom.choose import Choice, choose
from parloom.cost.units import format_seconds
from parloom.errors import ParloomError
from parloom.execute.machine import machine_for
from parloom.search.request import Request
from parloom.zoo import gpt, gshard, resnet

Row = dict[str, Any]
HERE = Path(__file__).parent
METHODS = (
    "auto", "megatron", "gpipe", "pipedream", "graphpipe", "alpa", "alpa_inter", "alpa_intra",
    "whale", "data_parallel", "fsdp",
)  # fmt: skip
LIMIT_S = 600
SLOW = str(HERE / "4xcore-100mbit.yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo or of this file, on a cluster."""

    model: str
    cluster: str
    flags: Mapping[str, Any]


def heavy_head() -> tuple[nn.Module, dict[str, Any]]:
    """A small GPT whose head takes as long as two and a half of its six blocks."""
    return gpt.build(batch=16, seq=64, vocab=8000, width=256, depth=6, heads=4)


def moe_10b() -> tuple[nn.Module, dict[str, Any]]:
    """Alpa's MoE for two nodes of eight V100."""
    return _experts(width=1536, experts=32)


def moe_27b() -> tuple[nn.Module, dict[str, Any]]:
    """Alpa's MoE for four nodes."""
    return _experts(width=2048, experts=48)


def _experts(width: int, experts: int) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        return gshard.build(
            batch=1024, seq=1024, vocab=32000, width=width, depth=16, heads=16,
            head_width=width // 16, inner=8 * width, experts=experts,
        )  # fmt: skip


def _wide(devices: int, channels: int, widening: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Batch norm over the whole batch, so that there is one microbatch: 32 images a device, where
    Alpa, whose microbatches have statistics of their own, takes 1,536 in all.
    """
    with torch.device("meta"):
        return resnet.build_wide_resnet(batch=32 * devices, channels=channels, widening=widening)


def wide_resnet_1b() -> tuple[nn.Module, dict[str, Any]]:
    """Wide-ResNet-50 of 1 B parameters, for four V100."""
    return _wide(4, 320)


def wide_resnet_2b() -> tuple[nn.Module, dict[str, Any]]:
    """The same of 2 B, for eight."""
    return _wide(8, 448)


def wide_resnet_4b() -> tuple[nn.Module, dict[str, Any]]:
    """The same of 4 B, for sixteen."""
    return _wide(16, 640)


def wide_resnet_7b() -> tuple[nn.Module, dict[str, Any]]:
    """The same of 6.8 B, for 32."""
    return _wide(32, 320, 16)


def _zoo(model: str, batch: int, devices: int) -> Case:
    cluster = f"{max(1, devices // 8)}x{min(8, devices)}xV100"
    return Case(f"zoo:{model}", cluster, {"batch": batch * devices, "optimizer": "sgd"})


def _own(model: str, cluster: str, dtype: str = "fp32") -> Case:
    return Case(f"{__file__}:{model}", cluster, {"optimizer": "adamw", "dtype": dtype})


CASES: Mapping[str, Case] = {
    "gpt": Case(f"{__file__}:heavy_head", SLOW, {"optimizer": "sgd"}),
    **{
        f"{model}-{devices}": _zoo(model, batch, devices)
        for devices in (4, 8, 16, 32)
        for model, batch in (("candle_uno", 256), ("dlrm", 64), ("mmt", 16))
    },
    "wide_resnet-4": _own("wide_resnet_1b", "1x4xV100-16GB"),
    "wide_resnet-8": _own("wide_resnet_2b", "1x8xV100-16GB"),
    "wide_resnet-16": _own("wide_resnet_4b", "2x8xV100-16GB"),
    "wide_resnet-32": _own("wide_resnet_7b", "4x8xV100-16GB"),
    "moe-16": _own("moe_10b", "2x8xV100-16GB", "fp16"),
    "moe-32": _own("moe_27b", "4x8xV100-16GB", "fp16"),
}


def row(name: str, cluster: str, method: str, found: Choice, cpu_s: float) -> Row:
    """One line of the table."""
    best = found.best
    return {
        "case": name,
        "cluster": Path(cluster).stem,
        "method": method,
        "step_s": best.prediction.step_s,
        "bound_s": found.bound_s,
        "peak_bytes": best.prediction.peak_bytes,
        "stages": len(best.decisions.stages),
        "devices": best.decisions.num_ranks,
        "num_microbatches": best.decisions.num_microbatches,
        "schedule": best.decisions.schedule,
        "cpu_s": cpu_s,
        "revision": revision(),
    }


def _late(number: int, frame: object) -> None:
    raise TimeoutError(f"not over after {LIMIT_S} s")


def measured(name: str, methods: Sequence[str]) -> list[Row]:
    """These methods on one case."""
    signal.signal(signal.SIGALRM, _late)
    case, found = CASES[name], []
    captured, machine = api.capture(case.model, **case.flags), machine_for(case.cluster, None)
    for method in methods:
        begun = time.process_time()
        request = Request(
            captured.graph, machine, captured.optimizer, machine.cluster.device.memory_bytes,
            method=method, all_devices=False,
        )  # fmt: skip
        signal.alarm(0 if method == "auto" else LIMIT_S)
        try:
            choice = choose(request, lambda text: None)
        except (ParloomError, TimeoutError) as error:
            spent_s = time.process_time() - begun
            print(
                f"{name}, {method}: {str(error).splitlines()[0]}, {spent_s:.0f} CPU s", flush=True
            )
            continue
        finally:
            signal.alarm(0)
        found.append(row(name, case.cluster, method, choice, time.process_time() - begun))
        one = found[-1]
        print(
            f"{name:<12} {method:<14} {format_seconds(one['step_s']):>9}"
            f"  {one['stages']} stages on {one['devices']} devices, {one['num_microbatches']}"
            f" microbatches, {one['schedule']}, {one['cpu_s']:.0f} CPU s",
            flush=True,
        )
    return found


def faults(rows: list[Row]) -> list[str]:
    """Plans that are faster than that of `auto`, or than its bound allows."""
    best = {r["case"]: r for r in rows if r["method"] == "auto"}
    found = []
    for one in rows:
        auto = best[one["case"]]
        if one["step_s"] < auto["step_s"] * (1 - 1e-9):
            found.append(f"{one['case']}: {one['method']} is faster than auto")
        if auto["bound_s"] and one["step_s"] < auto["bound_s"]:
            found.append(f"{one['case']}: {one['method']} is below the bound")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--methods", default=",".join(METHODS), help="auto among them")
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows: list[Row] = reported(asked.json)
    done = {row["case"] for row in rows}
    for name in asked.cases.split(","):
        if name not in done:
            rows += measured(name, asked.methods.split(","))
            report("pipelines_compared", rows, asked.json)
    wrong = faults(rows)
    print("\n".join(wrong) or "auto is never slower")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
