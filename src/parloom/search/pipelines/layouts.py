"""Layouts of a whole model on one group of the devices of a pipeline, in which items are priced."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

from parloom.ir.plan import Decisions
from parloom.search.contexts import Contexts, ContextSearch, with_passes
from parloom.search.decide import decisions_of
from parloom.search.least import batch_bytes
from parloom.search.pipelines.costs import ItemCosts, Pricer
from parloom.search.step_rows import Passes, ShadowPrices, row_prices

# Meshes of a group that are searched: of one axis, and cut between levels.
MESHES = 2
# Microbatches that a group has in flight for each of its stages, by 1F1B, and more for other lists.
SLACK = 1.25
# Shares of the memory that layouts are made for: what a stage holds beyond what is counted differs.
MARGINS = (0.9, 0.7)
# How near the first bound of a context is to the least Lagrangian.
ROUGH = 0.01
# Prices at which weights and gradients on the move are hidden, and computing counts.
COMPUTING = ShadowPrices(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A layout of the whole model on one group, in which its items are priced."""

    context: ContextSearch
    costs: ItemCosts


class GroupLayouts:
    """Lays the model of `contexts` out on groups of a pipeline of so many `devices`, each of which
    may hold `margin` of the limit.
    """

    def __init__(
        self, contexts: Contexts, pricer: Pricer, devices: int, margin: float = MARGINS[0]
    ) -> None:
        self.contexts, self.pricer, self.devices, self.margin = contexts, pricer, devices, margin
        self.known: dict[tuple[int, int], list[GroupLayout]] = {}
        # What no layout takes less than, whatever it holds; at the prices of the latest layout.
        self.least_ps: dict[tuple[int, int], float] = {}
        self.duals = COMPUTING

    def of(self, size: int, count: int, enough_ps: float = inf) -> list[GroupLayout]:
        """Layouts on groups of `size` that may take less than `enough_ps` with `count`
        microbatches, in which what a group sends hides behind what it computes.
        """
        if (size, count) not in self.known:
            part = self.contexts.on_part(self.contexts.request.on(size))
            found: list[GroupLayout] = []
            bounds = [inf]
            for mesh in part.meshes[:MESHES]:
                program = part.on(mesh, count)
                if program is None:
                    continue
                context = part.search(program, mesh, count)
                free = self.duals.with_byte(0.0)
                context.columns.prove(free, ROUGH)
                bounds.append(context.columns.bounds[free] / (self.devices // size))
                if bounds[-1] <= enough_ps:
                    found += self._laid_out(context, True, self.margin)
            self.known[size, count], self.least_ps[size, count] = found, min(bounds)
        return self.known[size, count]

    def exposed(self, layout: GroupLayout) -> list[GroupLayout]:
        """The same as if nothing hid behind computing."""
        known = self.known[layout.costs.num_devices, layout.costs.num_microbatches]
        wholes = {other.costs.whole for other in known}
        found = list(self._laid_out(layout.context, False, self.margin, wholes))
        known += found
        return found

    def smaller(self, layout: GroupLayout) -> list[GroupLayout]:
        """The same for less memory."""
        context = layout.context
        found = list(self._laid_out(context, context.passes.hides, MARGINS[1]))
        self.known[layout.costs.num_devices, layout.costs.num_microbatches] += found
        return found

    def _laid_out(
        self,
        context: ContextSearch,
        hides: bool,
        margin: float,
        known: Collection[Decisions] = (),
    ) -> Iterator[GroupLayout]:
        """The layout of a context whose estimate is the least in its share of the memory, unless
        it is known.
        """
        request, count = self.contexts.request, context.num_microbatches
        groups = self.devices // context.mesh.num_ranks
        in_flight = max(1.0, min(count, SLACK * groups))
        pipelined = with_passes(context, Passes(count, in_flight, hides))
        room = request.limit_bytes - batch_bytes(request.graph)
        pipelined.limit = max(1.0, margin * groups * room)
        pipelined.run(self.duals)
        self.duals = pipelined.duals
        candidate = next(pipelined.candidates(), None)
        if candidate is None:
            return
        prices = row_prices(pipelined.duals, pipelined.passes)
        base = self.contexts.base
        whole = decisions_of(pipelined.layouts, candidate, count, base, prices)
        self.contexts.work.spend()
        if whole in known:
            return
        costs = self.contexts.refusals.tried(lambda: self.pricer.price(whole))
        if costs is not None:
            yield GroupLayout(pipelined, costs)
