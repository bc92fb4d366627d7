"""Algebra first, then parallelism: the order of tools that rewrite the graph of one device before a
planner of layouts sees it.

The comparison of a joint search with this is the subject of Unity (Unger et al., OSDI'22, sections
1 and 8); the form is the cheapest of all that the joint search may choose from.
"""

from parloom.comparators.fixed_form import on_first_part
from parloom.cost.units import format_seconds
from parloom.search.contexts import Contexts
from parloom.search.least_compute import least_on_one_device
from parloom.search.request import Request, Say, base_of
from parloom.search.rewritten import as_pinned, forms_for, with_takes


def sequential(request: Request, say: Say) -> tuple[str, ...]:
    """The rewrites with which one device computes least, as if it had all the memory.

    Raises `InputError` for a pin on a rewrite that applies nowhere.
    """
    pinned = as_pinned(with_takes(request))
    own = on_first_part(pinned.request)
    contexts = Contexts(own, base_of(own), forms_for(own))
    least_ps, form = least_on_one_device(contexts)
    say(f"sequential: one device computes {format_seconds(least_ps / 1e12)} at least")
    return (*pinned.rewrites, *form.rewrites)
