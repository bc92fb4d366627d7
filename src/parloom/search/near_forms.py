"""Contexts of one form of the graph, beside those in which forms are chosen with layouts.

A search of all forms says what none goes below, and which form promises most. Layouts are better
found in a form of its own: there are fewer choices, and bounds are near what there is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from parloom.search.contexts import Contexts, ContextSearch, EstimateErrors, SimulatedPlan
from parloom.search.least_compute import least_on_one_device
from parloom.search.meshes import MAX_AXES
from parloom.search.rewritten import in_form
from parloom.search.step_rows import ShadowPrices

# Contexts that are looked at in each form, and how much longer than the best plan those of another
# form may take from which better ones are looked for: local search and climbing gain as much.
NEAREST, NEAR_FORMS = 2, 0.1
# How far the bound of such a form may be above that of the best plan's, as a share of what that
# plan is above its own.
NEAR_BOUNDS = 0.15
# How near the first bounds of a context are to the least Lagrangian.
ROUGH = 0.01
Rewrites = tuple[str, ...]


class NearForms:
    """The forms that plans may have, and the contexts that were looked at in one of them alone, of
    those that the search of `contexts` looked at in all.
    """

    def __init__(self, contexts: Contexts) -> None:
        self.contexts, self.looked = contexts, list[ContextSearch]()
        self._known: dict[Rewrites, Contexts] = {}

    def look(
        self,
        promising: Sequence[ContextSearch],
        best: SimulatedPlan | None,
        seen: EstimateErrors,
    ) -> None:
        """Search the first of `promising`, each in the form of the graph as it is, in that with
        which one device computes least, and in that of the best plan, where there are several.
        """
        coarse = [one for one in promising if len(one.mesh.axes) <= MAX_AXES]
        if best and self.contexts.request.takes:
            nearest = [c for c in coarse[:NEAREST] if _may_beat(c, best, seen)]
            for rewrites in dict.fromkeys(((), self._cheapest, best.decisions.rewrites)):
                duals = ShadowPrices()  # as where that form is all there is
                for context in self._in_form(rewrites, nearest):
                    self.looked.append(context)
                    context.columns.prove(duals, ROUGH)
                    if _may_beat(context, best, seen):
                        context.run(duals, best.step_ps / min(1.0, seen.ratio))
                        context.improve(best.step_ps * (1 + NEAR_FORMS), seen)
                        duals = context.duals

    def instead(self, joint: Sequence[ContextSearch]) -> list[ContextSearch]:
        """Contexts in forms of their own, and those of all forms that have none there."""
        own = {_place(context) for context in self.looked}
        return [*self.looked, *(context for context in joint if _place(context) not in own)]

    def _in_form(
        self, rewrites: Rewrites, nearest: Sequence[ContextSearch]
    ) -> Iterator[ContextSearch]:
        """Those in this form that were not looked at."""
        if rewrites not in self._known:
            self._known[rewrites] = in_form(self.contexts, rewrites)
        own = self._known[rewrites]
        looked = {_place(c) for c in self.looked if c.layouts.program.rewrites == rewrites}
        for near in nearest:
            request = replace(near.request, takes=(), pinned=own.request.pinned)
            part, count = own.on_part(request), near.num_microbatches
            program = part.on(near.mesh, count)
            if program is not None and _place(near) not in looked:
                context = part.search(program, near.mesh, count)
                context.limit = near.limit
                yield context

    @cached_property
    def _cheapest(self) -> Rewrites:
        return least_on_one_device(self.contexts)[1].rewrites


def _may_beat(context: ContextSearch, best: SimulatedPlan, seen: EstimateErrors) -> bool:
    """Whether a context may have a better plan; one of all forms, in any of them."""
    return seen.promises(context.columns.bound_ps(context.limit), best.step_ps)


def _place(context: ContextSearch) -> tuple[object, ...]:
    return context.mesh, context.num_microbatches
