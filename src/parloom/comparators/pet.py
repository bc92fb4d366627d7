"""PET: substitutions by programs that are equal on a part of the results, with what corrects the
rest (Wang et al., OSDI'21).

The best-first search of `taso` with rules of such programs beside its own. They are generated,
corrected and proved beforehand (`rewrite/generation/partial.py`), where the paper does so for the
subprograms of each model.
"""

from parloom.comparators.taso import backtracking
from parloom.rewrite.follows import partial_for
from parloom.search.request import Request, Say

# A correction is a dozen operators, most of them views: the paper has no limit but of its depth.
LARGER = 4


def pet(request: Request, say: Say) -> tuple[str, ...]:
    """The rewrites that the search finds, of those that pins leave.

    Raises `InputError` for a pin on a rewrite that applies nowhere.
    """
    return backtracking("pet", request, say, partial_for, LARGER)
