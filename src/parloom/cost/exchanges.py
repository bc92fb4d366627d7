"""What collectives over axes of a mesh cost where the mesh lies, or where it may lie."""

from parloom.cost.collectives import BACKENDS, collective, group_of
from parloom.cost.embedding import embedded, on_torus
from parloom.cost.kernels import Kernels
from parloom.cost.works import Exchange
from parloom.ir.mesh import Cluster, Mesh

Asked = tuple[str, tuple[str, ...], float]
"""Kind, axes and bytes of a collective, as `algorithms` counts them."""


class Exchanges:
    """Prices of collectives over axes of `mesh`; `sent` is all that was asked for.

    Where kernels have `places`, each collective is priced where it is fastest.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, kernels: Kernels) -> None:
        self.mesh, self.cluster, self.kernels = mesh, cluster, kernels
        self.sent: dict[Asked, Exchange] = {}
        self._on_torus = on_torus(mesh, cluster)

    def price(self, kind: str, axes: tuple[str, ...], moved: float) -> Exchange:
        """One collective over the joint group of `axes`."""
        found = self.sent.get((kind, axes, moved))
        if found is None:
            places = self.kernels.places
            meshes = places(self.mesh, self.cluster, kind, axes) if places else (self.mesh,)
            ways = (self._on(mesh, kind, axes, moved) for mesh in meshes)
            found = self.sent[kind, axes, moved] = min(ways, key=lambda way: way.seconds)
        return found

    def _on(self, mesh: Mesh, kind: str, axes: tuple[str, ...], moved: float) -> Exchange:
        """It where `mesh` lies: as measured, or else the fastest algorithm."""
        group = group_of(tuple(mesh[a] for a in axes))
        lying = embedded(mesh, axes, self.cluster) if self._on_torus else None
        found = collective(kind, moved, group, self.cluster, embedding=lying)
        backend, table = BACKENDS[self.cluster.backend], self.kernels.exchanges
        scratch = round(backend.scratch.get(kind, 0.0) * moved)
        timed = table.exchange(kind, moved, group) if table and moved else None
        seconds, latency_s, slows = timed or (found.seconds, found.latency_s, backend.slows)
        if timed and lying:  # neighbors were measured
            times = found.seconds / collective(kind, moved, group, self.cluster).seconds
            seconds, latency_s = times * seconds, times * latency_s
        return Exchange(kind, axes, found.traffic, seconds, latency_s, scratch, slows, found.busy)
