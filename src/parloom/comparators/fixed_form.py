"""Methods that choose the form of a model first and its layouts afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from parloom.errors import InputError
from parloom.rewrite.rewrites import derived
from parloom.rewrite.take import Take
from parloom.search.contexts import Contexts
from parloom.search.least_compute import least_work_ps
from parloom.search.pins import Kind
from parloom.search.request import AUTO, Request, Say, base_of
from parloom.search.rewritten import RewrittenRequest, as_pinned, with_takes

Algebra = Callable[[Request, Say], tuple[str, ...]]
"""The rewrites of the form that a method chooses, whatever the layouts."""


class FixedForm(RewrittenRequest):
    """`asked` in the form of `rewrites`, to be planned by `auto` without other rewrites.

    Raises `InputError` where these do not follow from their rules.
    """

    def __init__(self, asked: Request, rewrites: Sequence[str]) -> None:
        super().__init__(asked, rewrites)
        derived(asked.graph, self.rewrites)
        found = self.request
        self.request = replace(found, method=AUTO, pinned=found.pinned.without_rewrites())


def on_first_part(request: Request) -> Request:
    """The request on the first regular part of its cluster, whose devices say what forms cost."""
    (_, own), *_ = request.regular()
    return own


def work_ps(request: Request, rewrites: Sequence[str]) -> float:
    """What one device computes in a step of this form."""
    form = RewrittenRequest(on_first_part(request), rewrites).request
    return least_work_ps(Contexts(form, base_of(form)))


def proved(request: Request, takes: Sequence[Take]) -> bool:
    """Whether these takes can be made and follow from the rules that they name."""
    try:
        derived(request.graph, tuple(map(str, takes)))
    except InputError:
        return False
    return True


def wanted(request: Request) -> RewrittenRequest:
    """The request in the form with the rewrites that pins want, wherever they apply; raises
    `InputError` where one does nowhere.
    """
    pins = request.pinned.pins
    if any(pin.kind is Kind.REWRITE and not pin.forbidden for pin in pins):
        return as_pinned(with_takes(request))
    return RewrittenRequest(request, ())
