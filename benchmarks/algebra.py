"""Algebra and layouts chosen together, against algebra first, in one cost model.

    PYTHONPATH=. python benchmarks/algebra.py [--clusters 1x4xV100,..] [--models bert_large,..]
        [--methods auto,..] [--random 200 [--seed 0]] [--rules] [--limit 600]
        [--json FILE [--resume]] [--table]

Unity's seven models, as published and as in its artifact, on four clusters, all devices in use,
stages allowed: the step of each method, bytes that a device sends, peak memory, rewrites, CPU
seconds of planning. `auto --no-rewrites` says what layouts alone come to. `--random`: so many
random models (`algebra_random.py`) in place of these. `--rules` plans again where `auto` has
rewrites, without each of their rules, in place of new cases. Rows are written as they come;
`--resume` keeps those of the same revision of what plans; `--table` prints the tables of all rows
and plans nothing. Exit code 1 where `auto` is slower than another method or a plan cannot be read
back.
"""

import argparse
import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from algebra_plans import (
    FORBIDDEN,
    LIMIT_S,
    NO_REWRITES,
    PLANNING,
    Row,
    planned,
    say,
    source_revision,
)
from algebra_random import METHODS as OF_RANDOM
from algebra_random import random_cases
from algebra_tables import faults, tables
from common import report

from parloom import api, zoo
from parloom.capture.batches import MOST_ELEMENTS
from parloom.cost.clusters import resolve_cluster

Captured = Callable[[], api.Captured]
Case = tuple[str, str, Captured]
"""The name of a model, a cluster, and how the model is captured for it."""
CLUSTERS = ("1x4xV100", "2x8xV100", "32x6xV100", "1x8xH100")
MODELS = ("mlp_unify", "candle_uno", "dlrm", "xdl", "bert_large", "resnext50", "inception_v3")
ARTIFACTS = ("candle_uno", "dlrm", "bert_large", "resnext50", "inception_v3")
METHODS = ("auto", NO_REWRITES, "sequential", "unity", "alpa", "flexflow")
EVERY = (*MODELS, *(f"{name}_artifact" for name in ARTIFACTS))


def cases(models: Sequence[str], clusters: Sequence[str]) -> Iterator[Case]:
    """Models of the zoo, each device with as many samples as the zoo gives a batch, or half as many
    while that is too large to be made.
    """
    for cluster in clusters:
        devices = resolve_cluster(cluster).cluster.num_devices
        for name in models:
            yield name, cluster, partial(_captured, name, devices)


def _captured(name: str, devices: int) -> api.Captured:
    with torch.device("meta"):
        _, inputs = zoo.build(name)
    samples = next(iter(inputs.values())).shape[0]
    elements = sum(own.numel() for own in inputs.values()) // samples
    while samples * devices * elements > MOST_ELEMENTS:
        samples //= 2
    return api.capture(f"zoo:{name}", batch=samples * devices, optimizer="sgd")


def run(
    some: Iterable[Case], methods: Sequence[str], rows: list[Row], args: argparse.Namespace
) -> None:
    """Plan these cases by these methods, where there is no row of them yet."""
    for model, cluster, capture in some:
        known = {r["method"]: r for r in rows if (r["model"], r["cluster"]) == (model, cluster)}
        wanted = without_rules(known.get("auto")) if args.rules else methods
        missing = [method for method in wanted if method not in known]
        if not missing:
            continue
        key: Row = {"model": model, "cluster": cluster, "revision": source_revision(PLANNING)}
        try:
            captured = capture()
        except Exception as error:  # a row of its own, whatever it is
            words = " ".join(str(error).split())[:300]
            failed = {"error": f"not captured: {type(error).__name__}: {words}"}
            rows += [key | {"method": method} | failed for method in missing]
            report("algebra", rows, args.json)
            say(rows[-1])
            continue
        gc.freeze()
        for method in missing:
            rows.append(key | {"method": method} | planned(captured, cluster, method, args.limit))
            say(rows[-1])
            report("algebra", rows, args.json)


def without_rules(auto: Row | None) -> list[str]:
    """Methods that do without one rule of those that `auto` chose."""
    return [FORBIDDEN + rule for rule in (auto or {}).get("rules", ())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--models", default=",".join(EVERY))
    parser.add_argument("--methods", default=None, help="auto among them")
    parser.add_argument("--random", type=int, default=0, help="number of random models")
    parser.add_argument("--seed", type=int, default=0, help="of the first random model")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--limit", type=int, default=LIMIT_S, help="CPU seconds of a plan")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = known(args.json, args.table) if args.resume or args.table else []
    if args.table:
        print(tables(rows, args.models.split(","), args.clusters.split(","), METHODS))
    else:
        methods = args.methods or ",".join(OF_RANDOM if args.random else METHODS)
        with tempfile.TemporaryDirectory(prefix="parloom-algebra-") as folder:
            drawn = random_cases(args.seed, args.random, Path(folder))
            listed = cases(args.models.split(","), args.clusters.split(","))
            run(drawn if args.random else listed, methods.split(","), rows, args)
    wrong = faults(rows)
    print("\n".join(wrong) or "auto is never slower, and all plans can be read back")
    return int(bool(wrong))


def known(path: str | None, every: bool) -> list[Row]:
    """The rows of a file, without those of other revisions of parloom."""
    if path is None or not Path(path).exists():
        return []
    found: list[Row] = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    return [row for row in found if every or row["revision"] == source_revision(PLANNING)]


if __name__ == "__main__":
    raise SystemExit(main())
