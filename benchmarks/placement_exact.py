"""Placements of a slice of eight chips against all 8! orders, each priced as collectives are.

    PYTHONPATH=. python benchmarks/placement_exact.py [--meshes 2x4,8] [--json FILE]

Over each axis and over all together go all-reduces and exchanges with everybody, of 10 kB and of
100 MB. For many weights of these, the least sum of any order, and of the placements that the search
looks at; exit code 1 where an order is better. The tests do so for rings, and for six chips.
"""

import argparse
import time
from collections.abc import Iterable
from itertools import permutations
from math import prod

import numpy as np
from common import report
from numpy.typing import NDArray

from parloom.cost.clusters import load_cluster
from parloom.cost.exchanges import Asked
from parloom.cost.walk import Walker
from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis
from parloom.search.placements import placements
from parloom.search.placing import patterns_of

SLICE = "TPU-v5e:2x4"
KINDS, SIZES, WEIGHTS = ("all_reduce", "all_to_all"), (1e4, 1e8), 1000


def mesh_of(cluster: Cluster, sizes: list[int]) -> Mesh:
    """Axes of these sizes, the last over the links that are numbered first."""
    primes, axes = list(cluster.prime_axes()), []
    for name, size in reversed(list(zip("xyzw", sizes, strict=False))):
        own: list[PrimeAxis] = []
        while prod(p.size for p in own) < size:
            own.append(primes.pop(0))
        axes.append(MeshAxis(name, tuple(reversed(own))))
    return Mesh(tuple(reversed(axes)))


def seconds(cluster: Cluster, meshes: Iterable[Mesh], asked: list[Asked]) -> NDArray[np.float64]:
    """[mesh, what is sent]."""
    rows = []
    for mesh in meshes:
        walker = Walker({}, mesh, cluster)
        rows.append([walker.exchange(*what).seconds for what in asked])
    return np.array(rows)


def row_of(text: str) -> dict[str, object]:
    """One mesh, against all orders."""
    cluster = load_cluster(SLICE)
    plain = mesh_of(cluster, [int(size) for size in text.split("x")])
    over = list(dict.fromkeys([*((name,) for name in plain.names), plain.names]))
    asked = [(kind, axes, size) for kind in KINDS for axes in over for size in SIZES]
    started = time.process_time()
    found = placements(plain, cluster, patterns_of(asked))
    spent = time.process_time() - started
    ours = seconds(cluster, found, asked)
    orders = (Mesh(plain.axes, order) for order in permutations(range(cluster.num_devices)))
    every = seconds(cluster, orders, asked)
    # Small messages and large ones take turns to matter.
    weights = (
        np.random.default_rng(0).random((len(asked), WEIGHTS)) ** 6 / every.min(axis=0)[:, None]
    )
    best, least = (ours @ weights).min(axis=0), (every @ weights).min(axis=0)
    default = (ours[:1] @ weights)[0]
    return {
        "mesh": text,
        "orders": len(every),
        "placements": len(found),
        "cpu_s": spent,
        "worst": float((best / least).max()),
        "default_worst": float((default / least).max()),
        "default_median": float(np.median(default / least)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", default="2x4,4x2,8")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("| mesh | orders | placements | CPU s | ours / least, worst | default / least, worst |"
          " median |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for text in arguments.meshes.split(","):
        rows.append(row_of(text))
        row = rows[-1]
        print(f"| {text} | {row['orders']} | {row['placements']} | {row['cpu_s']:.1f} |"
              f" {row['worst']:.9f} | {row['default_worst']:.3f} |"
              f" {row['default_median']:.3f} |", flush=True)  # fmt: skip
        report("placement_exact", rows, arguments.json)
    return int(any(float(str(row["worst"])) > 1 + 1e-9 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
