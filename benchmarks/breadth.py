"""Which models are captured, with which operators, and which plans of them are equal.

    PYTHONPATH=. python benchmarks/breadth.py [--models listed,GemmaForCausalLM] [--plans 10]
        [--timeout SECONDS] [--json FILE] [--keep]

`--models` takes groups (`listed`, `common`, `zoo`, a task of transformers such as `causal_lm`) and
architectures. Each model runs in a process of its own, which is ended after `--timeout` seconds:
it is captured, its loss and gradients are compared with the model's to the bit, its operators are
counted, and data_parallel, fsdp, megatron at each degree and random legal plans on four gloo ranks
are compared with one device (`gate.py`). Exit code 1 where something differs or fails.
`support_matrix.py` writes the table of `docs/support.md` from the JSON.
"""

import argparse
import copy
import json
import multiprocessing
import resource
import time
from collections import Counter
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from breadth_models import names, tiny
from common import report
from gate import told, verdicts
from rules import coverage
from support_matrix import wrong
from tests.dist import lowered
from torch import Tensor, nn

from parloom.capture import capture, parameters_of
from parloom.execute.reference import evaluate
from parloom.ir.graph import Call, Graph

Row = dict[str, Any]
SHAPE = (2, 2)


def examine(name: str, plans: int, row: Row) -> None:
    """Fill in what is found out about one model, in order, so that a failure keeps the rest."""
    started = time.perf_counter()
    model, batch = tiny(name)
    row["built"] = True
    row["parameters"] = sum(p.numel() for p in model.parameters())
    graph = capture(model, batch)
    row["capture_s"] = round(time.perf_counter() - started, 2)
    row["kinds"] = kinds(graph)
    row["rounding"], row["rounding_at"] = rounding(graph, model, batch)
    row |= coverage(graph)
    found: dict[str, float | str] = {}  # by plan its largest relative error, or what is wrong
    row["plans"] = found
    worst = -1.0
    for verdict in verdicts(lowered.of(model, batch, graph), SHAPE, plans):
        found[verdict.plan] = verdict.wrong or float(f"{verdict.error:.1e}")
        if verdict.error is not None and verdict.error > worst:
            worst, row["worst_tensor"] = verdict.error, verdict.tensor
    row["seconds"] = round(time.perf_counter() - started, 1)


def kinds(graph: Graph) -> dict[str, int]:
    """How often each block kind is called, over the whole program."""
    counts: Counter[str] = Counter()

    def visit(body: tuple[object, ...]) -> None:
        for item in body:
            if isinstance(item, Call):
                counts[item.function] += 1
                visit(graph.by_name[item.function].body)

    visit(graph.main.body)
    inline = sum(not isinstance(item, Call) for item in graph.main.body)
    return {**counts, "(inline)": inline}


def rounding(graph: Graph, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of loss, gradients and buffers from the model's, and where; 0 is bits.

    Relative to the largest element of each.
    """
    twin = copy.deepcopy(model)
    state = parameters_of(model, graph)
    values = {
        i.value.name: (batch if i.kind == "batch" else state)[i.target]
        for i in graph.inputs
        if i.kind != "constant"
    }
    torch.manual_seed(5)
    found = evaluate(graph, values)
    torch.manual_seed(5)
    output: Any = twin(**{k: v.clone() for k, v in batch.items()})
    loss = output.loss if hasattr(output, "loss") else output[0]
    assert found["loss"] is not None
    torch.autograd.backward(found["loss"])
    torch.autograd.backward(loss)
    pairs = [("loss", found["loss"].detach(), loss.detach())]
    for (path, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        zero = torch.zeros_like(mine)
        ours, wanted = (zero if p.grad is None else p.grad for p in (mine, theirs))
        pairs.append((f"gradient of {path}", ours, wanted))
    buffers = dict(twin.named_buffers())
    pairs += [(f"buffer {path}", v, buffers[path]) for path, v in found["updates"].items()]
    model.zero_grad()
    worst = (0.0, "")
    for name, ours, wanted in pairs:
        if not torch.equal(ours, wanted):
            scale = wanted.double().abs().max().clamp(min=1e-30)
            worst = max(worst, (float((ours.double() - wanted.double()).abs().max() / scale), name))
    return worst


def child(name: str, plans: int, pipe: Connection) -> None:
    """One model in a process of its own; whatever is found is sent, a failure included."""
    row: Row = {"model": name}
    try:
        examine(name, plans, row)
    except Exception as err:
        row["failed"] = told(err)
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    pipe.send(row)
    pipe.close()


def isolated(name: str, plans: int, timeout_s: float) -> Row:
    """The row of one model, from a forked process that is ended when its time is over."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, plans, theirs))
    process.start()
    theirs.close()
    row: Row = {"model": name, "failed": f"no result within {timeout_s:g} s"}
    try:
        if ours.poll(timeout_s):
            row = ours.recv()
    except EOFError:
        row = {"model": name, "failed": "the process died"}
    process.kill()
    process.join()
    return row


def printed(row: Row) -> str:
    """One line for the model and one for each thing that is not as it should be."""
    lines = [f"{row['model']:44}"]
    if "rule_calls" in row:
        plans = row.get("plans", {})
        errors = [e for e in plans.values() if not isinstance(e, str)]
        same = f"{row['rounding']:.0e}" if row["rounding"] else "bits"
        lines[0] += (
            f" {row['calls']:5} calls  rules {row['rule_calls']:7.2%} of calls"
            f" {row['rule_flops']:8.3%} of flops  plans {len(errors)}/{len(plans)}, worst"
            f" {max(errors, default=0.0):.1e}  {same}  {row.get('seconds', '-')} s  {row['kinds']}"
        )
        lines += [f"    {op}: {rest}" for op, rest in row["unsplit"].items()]
    lines += [f"    {text}" for text in wrong(row)]
    return "\n".join(lines)


def earlier(path: str | None) -> dict[str, Row]:
    """The rows in a file by model."""
    if path is None or not Path(path).exists():
        return {}
    rows: list[Row] = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    return {row["model"]: row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="listed,zoo")
    parser.add_argument("--plans", type=int, default=10, help="random plans per model")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds per model")
    parser.add_argument("--json", default=None)
    parser.add_argument("--keep", action="store_true", help="rows of other models in the file stay")
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are forked, ranks are threads
    chosen = dict.fromkeys(n for group in args.models.split(",") for n in names(group))
    rows = earlier(args.json) if args.keep else {}
    for name in chosen:
        row = isolated(name, args.plans, args.timeout)
        rows[name] = row | {"date": datetime.now(UTC).date().isoformat()}
        print(printed(row), flush=True)
        report("breadth", list(rows.values()), args.json)
    good = sum(not list(wrong(rows[name])) for name in chosen)
    print(f"{good} of {len(chosen)} models pass")
    return int(good < len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
