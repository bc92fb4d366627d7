"""Answers to `parloom export`: files by which others start a plan, or are set up like it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from parloom.errors import InexpressibleError, InputError, NotYetError, nearest, shell_word
from parloom.execute.files import read_plan, write_atomic
from parloom.execute.startup import check_runs_here
from parloom.explain import case_of
from parloom.export import accelerate, deepspeed, dtensor, megatron, torchtitan
from parloom.export import model_explorer as explorer
from parloom.export.description import Description, describe
from parloom.export.launch import STARTS, job_of, launch_file
from parloom.export.launch import TARGETS as LAUNCHERS
from parloom.export.order import TARGETS as ORDERS
from parloom.export.order import order_file
from parloom.export.settings import Settings
from parloom.ir.plan import Plan
from parloom.ir.plan_json import plan_hash
from parloom.ir.text import parse_graph
from parloom.report.case import PipelineCase
from parloom.rewrite.rewrites import rewritten

FRAMEWORKS: Mapping[str, Callable[[Description], Settings]] = MappingProxyType(
    {
        "torchtitan": torchtitan.settings,
        "accelerate": accelerate.settings,
        "deepspeed": deepspeed.settings,
        "megatron": megatron.settings,
        "dtensor": dtensor.settings,
    }
)
"""The frameworks for which settings are written, by name."""
EXPLORER = "model-explorer"
TARGETS = (*LAUNCHERS, *ORDERS, *FRAMEWORKS, EXPLORER)


def export(
    path: str | Path, to: str, script: Sequence[str], out: str | Path, *, strict: bool = False
) -> dict[str, Any]:
    """Write the file of `to` for the plan at `path` into the folder `out`; what is in it.

    Raises `InputError` for a target that is not known and for what a launcher cannot start, and
    where `strict`, before anything is written, `InexpressibleError` for a plan of which a framework
    cannot be told all.
    """
    if to not in TARGETS:
        near, known = nearest(to, TARGETS), ", ".join(TARGETS)
        there = "" if near.endswith(known) else f"; there are {known}"
        raise InputError(f"--to: no target {to!r}{near}{there}")
    file = Path(path) / "plan.json" if Path(path).is_dir() else Path(path)
    plan = read_plan(file)
    if plan.inference is not None and to not in (*ORDERS, EXPLORER):
        check_runs_here(plan)
        raise NotYetError(
            f"not yet: --to {to} is about training, and this plan is for inference; `parloom run"
            f" {shell_word(path)} -- requests.jsonl` serves it"
        )
    document: dict[str, Any] = {"to": to, "plan_hash": plan_hash(plan)}
    if to in LAUNCHERS:
        job = job_of(plan, str(file), script)
        name, text = launch_file(to, job)
        document |= {"nodes": job.nodes, "processes_a_node": job.per_node}
    elif to in ORDERS:
        name, text = order_file(to, plan)
        document["not_expressible"] = []
    else:
        found = Settings(explorer.FILE, _explored(plan)) if to == EXPLORER else _settings(plan, to)
        if strict and found.missing:
            raise InexpressibleError(to, found.missing)
        name, text = found.name, found.text
        document["not_expressible"] = list(found.missing)
    return document | {"file": str(write_atomic(Path(out) / name, text))}


def export_screen(document: Mapping[str, Any]) -> RenderableType:
    """What was written, and what it does not say, for a terminal."""
    return Group(*map(Text, _lines(document)))


def _lines(document: Mapping[str, Any]) -> list[str]:
    plan = f"plan {document['plan_hash']}"
    if "nodes" in document:
        ranks = f"{document['nodes']} x {document['processes_a_node']} ranks"
        start = STARTS[document["to"]].format(shell_word(document["file"]))
        return [f"{document['file']}: {ranks} of {plan}", f"next: {start}"]
    if document["to"] in ORDERS:
        return [f"{document['file']}: where the ranks of {plan} are"]
    if document["to"] == EXPLORER:
        return [f"{document['file']}: the program of {plan}"]
    missing = document["not_expressible"]
    if not missing:
        return [f"{document['file']}: all decisions of {plan}"]
    listed = [f"  {line}" for line in missing]
    return [f"{document['file']}: settings of {plan}", "not expressible there:", *listed]


def _settings(plan: Plan, to: str) -> Settings:
    return FRAMEWORKS[to](describe(plan))


def _explored(plan: Plan) -> str:
    case = case_of(plan)
    graph = rewritten(parse_graph(plan.graph), plan.decisions.rewrites)
    stages = range(len(plan.decisions.stages))
    cases = [case.stage(i) for i in stages] if isinstance(case, PipelineCase) else [case]
    return explorer.model_explorer(graph, cases)
