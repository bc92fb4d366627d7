"""One plan of `algebra.py`: a method on a captured model and a cluster, in a process of its own."""

import gc
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

from common import ROOT
from random_modules import start

from parloom import api
from parloom.choose import choose
from parloom.cost.ledger import HOST
from parloom.cost.stages import transfer_bytes
from parloom.errors import ParloomError
from parloom.execute.machine import machine_for
from parloom.explain import case_of
from parloom.ir.factors import factorize
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_from_json, plan_to_json
from parloom.ir.text import parse_graph
from parloom.report.case import PipelineCase
from parloom.rewrite.rewrites import derived, takes_of
from parloom.search.pinned import NONE, resolve
from parloom.search.pins import NO_REWRITE, parse_pin
from parloom.search.request import AUTO, Request

Row = dict[str, Any]
NO_REWRITES = "auto --no-rewrites"
FORBIDDEN = "auto --forbid rewrite="
# CPU seconds of a plan, those in which it may end by itself, and wall seconds for each of them: the
# machine is shared.
LIMIT_S, GRACE_S, WALL = 600, 60, 6
SLOWER = 1e-9
# What decides which plan is found, and how long that takes.
PLANNING = (
    "candidates.py", "choose.py", "objectives.py", "linear_program.py", "capture", "clusters",
    "comparators", "cost", "ir", "rewrite", "search", "zoo",
)  # fmt: skip


@cache
def source_revision(parts: Sequence[str] = ("",)) -> str:
    """The last commit that changed parts of parloom, or any; it ends in `-dirty` where files
    differ.
    """

    def said(*words: str) -> str:
        command = ["git", *words, "--", *(f"src/parloom/{part}" for part in parts)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    dirty = "-dirty" if said("status", "--porcelain") else ""
    return said("log", "-1", "--format=%h").strip() + dirty


def planned(captured: api.Captured, cluster: str, method: str, limit_s: int) -> Row:
    """The row of a plan, or with an `error` in words."""
    here, process = start(_limited, limit_s, _planned, captured, cluster, method)
    try:
        found: Any = f"no result within {WALL * limit_s} s on a shared machine"
        if here.poll(WALL * limit_s):
            found = pickle.loads(here.recv_bytes())
    except EOFError:
        found = f"its process was killed: after {limit_s} CPU s or more, or for want of memory"
    process.kill()
    process.join()
    return found if isinstance(found, dict) else {"error": str(found)}


def _limited(limit_s: int, function: Callable[..., Row], *args: Any) -> Row:
    """What a function returns, within so many CPU seconds of this process."""
    signal.signal(signal.SIGXCPU, _late)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + GRACE_S))
    gc.disable()  # as `answer` does
    begun = time.process_time()
    try:
        return function(*args)
    except (ParloomError, TimeoutError) as error:
        words = " ".join(str(error).split())
        spent_s = time.process_time() - begun
        return {"error": f"{type(error).__name__}: {words[:400]}", "cpu_s": spent_s}


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("not over within its CPU seconds")


def _planned(captured: api.Captured, cluster: str, method: str) -> Row:
    machine, graph = machine_for(cluster, None), captured.graph
    asked, forbidden = AUTO, NO_REWRITE
    if method.startswith(FORBIDDEN):
        forbidden = f"rewrite={method.removeprefix(FORBIDDEN)}"
    elif method != NO_REWRITES:
        asked, forbidden = method, ""
    pins = [parse_pin(forbidden, forbidden=True)] if forbidden else []
    request = Request(
        graph, machine, captured.optimizer, machine.cluster.device.memory_bytes, method=asked,
        pinned=resolve(pins, graph, factorize(graph)) if pins else NONE,
    )  # fmt: skip
    said: list[str] = []
    with ExitStack() as stack:
        if method == NO_REWRITES:  # nothing is looked for that would be refused
            stack.enter_context(patch("parloom.candidates.with_takes", _unchanged))
        begun = time.process_time()
        choice = choose(request, said.append)
        cpu_s = time.process_time() - begun
    plan = captured.planned(choice, machine.loaded.spec, ())
    refused = [line for line in choice.notes if "not possible" in line or "not as asked" in line]
    found = {"step_s": choice.best.prediction.step_s, "bound_s": choice.bound_s, "cpu_s": cpu_s}
    return found | _described(plan, choice.best.name) | {"refused": refused}


def _unchanged(request: Request) -> Request:
    return request


def _described(plan: Plan, name: str) -> Row:
    """What else is recorded of a plan."""
    decisions, takes = plan.decisions, takes_of(plan.decisions.rewrites)
    assert plan.prediction is not None
    row: Row = {
        "name": name,
        "peak_bytes": plan.prediction.peak_bytes,
        "stages": len(decisions.stages),
        "devices": decisions.num_ranks,
        "num_microbatches": decisions.num_microbatches,
        "takes": [
            {"rules": list(one.rules), "values": len(list(one.taken)), "in": one.function}
            for one in takes
        ],
        "rules": dict(Counter(rule for one in takes for rule in one.rules)),
        "other_rewrites": len(decisions.rewrites) - len(takes),
        "sent_bytes": sent_bytes(plan),
    }
    unreadable = _unreadable(plan)
    return row | ({"unreadable": unreadable} if unreadable else {})


def sent_bytes(plan: Plan) -> Mapping[str, int]:
    """Bytes that a device sends in a step, by kind of transfer; the mean over all devices. Of
    weights that several stages have, what these send each other is not there.
    """
    found, case = Counter[str](), case_of(plan)
    for one in case.ledger.sent:
        if one.group.level not in HOST:
            found[one.group.transfer] += one.num_bytes
    if isinstance(case, PipelineCase):
        found["between stages"] = _between(case) // plan.decisions.num_ranks
    return dict(found)


def _between(case: PipelineCase) -> int:
    """Bytes that all stages send each other in a step."""
    pcgs, stages, found = case.stages.pcgs, case.decisions.stages, 0.0
    for transfer in case.stages.transfers:
        source, target = transfer.source, transfer.target
        if stages[source].devices != stages[target].devices:
            count = max(pcgs[source].num_microbatches, pcgs[target].num_microbatches)
            there, back = transfer_bytes(transfer, pcgs)
            found += count * there[0] * stages[source].mesh.num_ranks
            found += count * back[0] * stages[target].mesh.num_ranks if back else 0
    return round(found)


def _unreadable(plan: Plan) -> str:
    """Why a plan is not the same when its file is read; empty where it is."""
    try:
        text = plan_to_json(plan)
        if plan_to_json(plan_from_json(text, "plan")) != text:
            return "it differs"
        derived(parse_graph(plan.graph), plan.decisions.rewrites)
    except ParloomError as error:
        return " ".join(str(error).split())[:400]
    return ""


def say(row: Row) -> None:
    """Print a row in a line."""
    words = f"{row['model']} {row['cluster']} {row['method']}: "
    if "error" in row:
        words += row["error"]
    else:
        sent = sum(row["sent_bytes"].values())
        words += f"{1e3 * row['step_s']:.4f} ms, {sent / 1e6:.2f} MB, {row['cpu_s']:.1f} CPU s"
        words += f", {row['name']}; {len(row['takes'])} takes {row['rules'] or ''}"
        words += f"; UNREADABLE: {row['unreadable']}" if "unreadable" in row else ""
    print(words, file=sys.stderr, flush=True)
