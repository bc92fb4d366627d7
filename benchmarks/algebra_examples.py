"""Models whose forms ask for different layouts: towers that are joined by a concatenation and one
linear layer, or by the sum of a layer of each.

    PYTHONPATH=. python benchmarks/algebra_examples.py [--clusters 1x4xV100,..] [--limit 600]
        [--json FILE [--resume]] [--table]

Unity's example (Unger et al., OSDI'22), whose figure our sources lack: products that one device
computes faster as one are left apart, their contracted dims are partitioned and the parts reduced,
by which six times less is sent than by the best plan of the merged form. Here each is written in
both forms, and planned by all methods (see `algebra.py`). Exit code 1 where `auto` is slower than
another method, or than without rewrites, or where a plan cannot be read back.
"""

import argparse
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from algebra import METHODS, known, run
from algebra_plans import Row
from algebra_tables import faults, tables
from torch import Tensor, nn
from torch.nn.functional import relu

from parloom import api

CLUSTERS = ("1x4xV100", "4x1xV100", "1x8xH100", "benchmarks/4xcore-100mbit.yaml")
# Samples, and features of each input, tower and result.
SAMPLES, FEATURES, WIDTH, RESULTS = 512, 1024, 1024, 1024


class Joined(nn.Module):
    """Towers, and a linear layer of their concatenated results, or the sum of one of each."""

    def __init__(self, number: int, concatenated: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(FEATURES, WIDTH) for _ in range(number))
        widths = [number * WIDTH] if concatenated else [WIDTH] * number
        self.heads = nn.ModuleList(nn.Linear(width, RESULTS, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        made = [relu(tower(own)) for tower, own in zip(self.towers, x.unbind(), strict=True)]
        joined = [torch.cat(made, 1)] if len(self.heads) == 1 else made
        first, *others = (head(own) for head, own in zip(self.heads, joined, strict=True))
        loss: Tensor = sum(others, start=first).square().mean()
        return loss


def joined(number: int, concatenated: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """So many towers with a batch for each."""
    return Joined(number, concatenated), {"x": torch.randn(number, SAMPLES, FEATURES)}


def two_concatenated() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two towers, one layer."""
    return joined(2, True)


def two_summed() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two towers, a layer of each."""
    return joined(2, False)


def five_concatenated() -> tuple[nn.Module, dict[str, Tensor]]:
    """Five towers, one layer."""
    return joined(5, True)


def five_summed() -> tuple[nn.Module, dict[str, Tensor]]:
    """Five towers, a layer of each."""
    return joined(5, False)


MODELS = ("two_concatenated", "two_summed", "five_concatenated", "five_summed")


def cases(clusters: Sequence[str]) -> Iterator[tuple[str, str, partial[api.Captured]]]:
    """Each model on each cluster, and how it is captured."""
    for cluster in clusters:
        for name in MODELS:
            yield name, cluster, partial(api.capture, f"{Path(__file__)}:{name}", optimizer="sgd")


def main() -> int:
    parser = argparse.ArgumentParser(description="Models whose forms ask for different layouts.")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a plan")
    parser.add_argument("--json", default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.rules = False
    warnings.simplefilter("ignore")
    rows: list[Row] = known(args.json, args.table) if args.resume or args.table else []
    if args.table:
        print(tables(rows, MODELS, CLUSTERS, METHODS))
    else:
        run(cases(args.clusters.split(",")), METHODS, rows, args)
    wrong = faults(rows)
    print("\n".join(wrong) or "auto is never slower, and all plans can be read back")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
