"""Logical meshes of a cluster: runs of its prime axes, from the slowest links to the fastest."""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from parloom.ir.mesh import Cluster, Mesh, MeshAxis, PrimeAxis

# Outermost first.
NAMES = ("x", "y", "z", "w")
# Of the meshes on which everything is searched; `finer.refinements` cuts their axes.
MAX_AXES = 2


def logical_meshes(cluster: Cluster, max_axes: int = MAX_AXES) -> Iterator[Mesh]:
    """Every way to cut the prime axes of `cluster` into at most `max_axes` runs of neighbors.

    A mesh whose axes are cut where the levels of the topology are comes before others. 2x4 and 4x2
    over links of one level are two meshes: of two axes on one factor the first is outermost, and
    gathering the inner one is cheaper than gathering the outer one.
    """
    primes = tuple(reversed(cluster.prime_axes()))
    if not primes:
        yield Mesh((MeshAxis(NAMES[0], (PrimeAxis(1, 1, 0),)),))
        return
    found = [
        cuts
        for count in range(min(max_axes, len(primes)))
        for cuts in combinations(range(1, len(primes)), count)
    ]
    found.sort(key=lambda cuts: (across(primes, cuts), len(cuts), cuts))
    for cuts in found:
        ends = zip((0, *cuts), (*cuts, len(primes)), strict=True)
        yield Mesh(
            tuple(
                MeshAxis(name, primes[low:high])
                for name, (low, high) in zip(NAMES, ends, strict=False)
            )
        )


def on_all(mesh: Mesh, cluster: Cluster) -> Mesh | None:
    """A mesh of a part of `cluster` on all its devices, with one more axis, the outermost; None
    where there is no name for it.
    """
    there = {prime for axis in mesh.axes for prime in axis.primes}
    others = (prime for prime in reversed(cluster.prime_axes()) if prime not in there)
    name = next((name for name in NAMES if name not in mesh.names), None)
    return Mesh((MeshAxis(name, tuple(others)), *mesh.axes)) if name else None


def joined(mesh: Mesh) -> Iterator[Mesh]:
    """The meshes of two axes that `mesh` becomes where neighboring axes are joined."""
    for cut in range(1, len(mesh.axes)):
        halves = mesh.axes[:cut], mesh.axes[cut:]
        primes = (tuple(chain.from_iterable(axis.primes for axis in half)) for half in halves)
        yield Mesh(tuple(map(MeshAxis, NAMES, primes)))


def across(primes: Sequence[PrimeAxis], cuts: Sequence[int]) -> int:
    """How many cuts part links of one level."""
    return sum(primes[cut - 1].level == primes[cut].level for cut in cuts)
