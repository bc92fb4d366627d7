"""Questions of benchmarks: a case of `cases.yaml` on a cluster, under a limit on memory."""

import json
import time
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import yaml
from common import revision

from parloom import api
from parloom.execute.machine import machine_for
from parloom.execute.optimizers import named_optimizer
from parloom.ir.graph import Graph
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph, print_graph
from parloom.search.blocks import search_with_blocks
from parloom.search.request import Request, base_of

# What a case says of tables, and not of a model.
TABLE = ("clusters", "batches")
CASES = Path(__file__).resolve().parent / "cases.yaml"
Row = dict[str, Any]
T = TypeVar("T")


def documented() -> Row:
    """`cases.yaml` as it is."""
    document: Row = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    return document


def all_cases() -> dict[str, Row]:
    """Every case, those of `scale` too."""
    document = documented()
    return dict(document["cases"] | document["scale"])


def cluster_spec(cluster: str) -> str:
    """A cluster as `parloom plan` takes it; files lie beside `cases.yaml`."""
    return str(CASES.parent / cluster) if cluster.endswith(".yaml") else cluster


def devices_of(cluster: str) -> int:
    """How many devices a cluster has."""
    return machine_for(cluster_spec(cluster)).cluster.num_devices


def captured_case(model: str = "", config: Row | None = None, **flags: Any) -> api.Captured:
    """The model that a case names, or the Hugging Face model of its `config`."""
    flags = {name: value for name, value in flags.items() if name not in TABLE}
    if config is None:
        return api.capture(model, **flags)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return api.capture(str(path), **flags)


def graph_of(case: Row, folder: str | None) -> Graph:
    """The captured program of a case; kept as text in `folder`, if there is one, by revision."""
    if folder is None:
        return captured_case(**case).graph
    case = {name: value for name, value in case.items() if name not in TABLE}
    key = json.dumps([revision(), case], sort_keys=True)
    digest = sha256(key.encode()).hexdigest()[:16]
    path = Path(folder) / f"{digest}.graph"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(print_graph(captured_case(**case).graph), encoding="utf-8")
    return parse_graph(path.read_text(encoding="utf-8"))


def request_of(case: Row, graph: Graph, cluster: str, limit: int | None = None) -> Request:
    """What `parloom plan` would ask, of at most `limit` bytes (None: all that a device has)."""
    machine = machine_for(cluster_spec(cluster))
    there = machine.cluster.device.memory_bytes
    return Request(graph, machine, named_optimizer(case["optimizer"]), limit or there)


@dataclass(frozen=True)
class Answer:
    """What the search alone answers, without the rules of thumb beside it: an endless step where it
    finds nothing that fits. `estimate_bound_s`: no estimate of the space is below it.
    """

    decisions: Decisions | None
    step_s: float
    peak_bytes: int
    bound_s: float
    estimate_bound_s: float
    solver_gap: float | None
    cpu_s: float


def answer(request: Request) -> Answer:
    """Search, and say how long that took."""
    start = time.process_time()
    found = search_with_blocks(request, base_of(request), lambda text: None)
    spent = time.process_time() - start
    best = found.proposals[0] if found.proposals else None
    return Answer(
        best.decisions if best else None,
        best.step_ps / 1e12 if best else inf,
        best.peak_bytes if best else 0,
        found.bound_ps / 1e12,
        found.estimate_bound_ps / 1e12,
        found.solver_gap,
        spent,
    )


def sharded(items: list[T], shard: str) -> list[T]:
    """Every N-th, from the I-th on (`I/N`, from 1)."""
    number, of = map(int, shard.split("/"))
    return items[number - 1 :: of]
