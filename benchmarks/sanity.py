"""Ratios of predictions where one thing changes, beside what theory or a published ablation says.

    python benchmarks/sanity.py [--only WORDS] [--json FILE]

For each of `sanity_variants`: the base and the variant are predicted, and their ratio of step times
or bytes is compared with its interval, which was set before. Those that lie outside have a `cause`
with them; exit code 1 where another one does, or where one of these has come inside.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from common import report
from published_models import Model, Shape, graph_of
from sanity_bases import ACTIVATIONS, BASES, STATES, STEP, Setup, Variant, changed
from sanity_variants import VARIANTS

from parloom.comparators.handmade import program
from parloom.cost.clusters import load_cluster
from parloom.cost.kernels import Kernels, slowest
from parloom.cost.software import Software
from parloom.cost.tasks import COMPONENTS
from parloom.ir.graph import Graph
from parloom.ir.mesh import Cluster, Level

# Components of memory that a measure adds up, of the device that holds the most: states when it
# does, activations and what is recomputed of them when there are the most of these.
STATE_PARTS = ("weights", "gradients", "optimizer")
ACTIVATION_PARTS = ("activations", "recomputation")
INSIDE, BELOW, ABOVE = "inside", "below", "above"


def verdict(ratio: float, low: float, high: float) -> str:
    """Where a ratio lies."""
    if not ratio >= low:  # not a number, too
        return BELOW
    return INSIDE if ratio <= high else ABOVE


def cluster_of(setup: Setup) -> Cluster:
    """The devices of a run, with links as much faster or slower as it says."""
    cluster = load_cluster(f"{setup.nodes}x{setup.per_node}x{setup.device}")
    levels = [
        _level(level, setup.inner if index == 0 else setup.outer, setup.latency)
        for index, level in enumerate(cluster.levels)
    ]
    return replace(cluster, levels=tuple(levels))


def _level(level: Level, bandwidth: float, latency: float) -> Level:
    link = level.link
    changed_link = replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * bandwidth,
        down_bytes_per_s=link.down_bytes_per_s * bandwidth,
        latency_s=link.latency_s * latency,
    )
    return replace(level, link=changed_link)


def model_of(setup: Setup) -> Model:
    """What is captured for a run: a GPT, or with key heads a Llama."""
    sizes = {"width": setup.width, "heads": setup.heads, "seq": setup.seq}
    sizes["inner"] = setup.feed_forward or 4 * setup.width
    if setup.groups:
        sizes |= {"groups": setup.groups, "head_width": setup.width // setup.heads}
    else:
        sizes["drops"] = int(setup.drops)
    family = "llama" if setup.groups else "gpt"
    shape = Shape(family, tuple(sorted(sizes.items())), setup.dtype)
    return Model(shape, setup.vocab, setup.layers)


class Predictor:
    """Predicts runs; those that differ in kernels or links alone share a lowered program."""

    def __init__(self) -> None:
        self._graphs: list[tuple[Shape, Graph]] = []
        self.predicted = lru_cache(maxsize=None)(self._predicted)

    def _predicted(self, setup: Setup) -> dict[str, float]:
        """Each measure of a run: seconds of a step among many, and bytes."""
        cluster, plan = cluster_of(setup), setup.plan
        graph = graph_of(model_of(setup), plan.samples, self._graphs)
        kernels = Kernels(
            cluster.device, setup.software, None, setup.product_dtype, setup.scaling,
            pace=slowest(cluster),
        )  # fmt: skip
        timeline = program(graph, plan, cluster).play(cluster, kernels)
        memory = max((p.memory for p in timeline.processes), key=lambda memory: memory.peak)
        states = dict(zip(COMPONENTS, memory.at_peak, strict=True))
        activations = dict(zip(COMPONENTS, memory.peaks, strict=True))
        return {
            STEP: timeline.period_s,
            STATES: float(sum(states[name] for name in STATE_PARTS)),
            ACTIVATIONS: float(sum(activations[name] for name in ACTIVATION_PARTS)),
        }

    def row(self, variant: Variant) -> dict[str, object]:
        """What is printed and reported of a variant."""
        base = BASES[variant.base]
        before = self.predicted(base)[variant.measure]
        after = self.predicted(changed(base, variant.change))[variant.measure]
        ratio = after / before
        return {
            "name": variant.name,
            "base": variant.base,
            "change": {name: _plain(value) for name, value in variant.change.items()},
            "measure": variant.measure,
            "base_amount": before,
            "variant_amount": after,
            "ratio": ratio,
            "theory": variant.theory,
            "low": variant.low,
            "high": variant.high,
            "verdict": verdict(ratio, variant.low, variant.high),
            "source": variant.source,
            "reason": variant.reason,
            "cause": variant.cause,
        }


def _plain(value: object) -> object:
    return value.name if isinstance(value, Software) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a variant, and where those outside lie."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="variants whose name or base has these words")
    parser.add_argument("--json", help="file for the rows")
    asked = parser.parse_args(arguments)
    predictor = Predictor()
    rows = []
    unexpected = 0
    print(f"{'ratio':>7} {'theory':>7} {'from':>7} {'to':>7}  {'':6}  variant (base): source")
    for variant in VARIANTS:
        if asked.only not in f"{variant.name} ({variant.base})":
            continue
        row = predictor.row(variant)
        rows.append(row)
        said = "" if row["verdict"] == INSIDE else row["verdict"]
        print(
            f"{row['ratio']:7.3f} {variant.theory:7.3f} {variant.low:7.3f} {variant.high:7.3f}  "
            f"{said:6}  {variant.name} ({variant.base}): {variant.source}",
            flush=True,
        )
        if said:
            print(f"{'':41}suspected: {variant.cause or 'not known: this is new'}")
        elif variant.cause:
            print(f"{'':41}inside now: its cause may go")
        unexpected += bool(said) != bool(variant.cause)
    outside = sum(row["verdict"] != INSIDE for row in rows)
    print(f"{len(rows) - outside} of {len(rows)} inside")
    report("sanity", rows, asked.json)
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
