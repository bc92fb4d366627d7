"""Menus and prices that programs share: each has those that it would have alone."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from parloom.capture import capture
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.search.contexts import Contexts, ContextSearch
from parloom.search.prices import Known
from parloom.search.request import Request, base_of
from parloom.search.rewritten import forms_for, in_form, with_takes
from tests.property.searched import ADAM, PLENTY
from tests.zoo_sizes import small

CLUSTERS = ("2x4xH100", "8xH100")
"""One type of device, and other links."""
MODEL, COUNT = "gshard", 2


def asked(cluster: str) -> Request:
    graph = capture(*small(MODEL, batch=16))
    return with_takes(Request(graph, DataSheets(load_cluster(cluster)), ADAM, PLENTY))


def contexts_of(request: Request, known: Known) -> Iterator[Contexts]:
    """Those of all forms, of the model's own, and of both on a part of the cluster."""
    joint = Contexts(request, base_of(request), forms_for(request), shared=known)
    for one in (joint, in_form(joint, ())):
        yield one
        yield one.on_part(replace(one.request, machine=one.request.machine.part(4)))


def searches(contexts: Contexts) -> Iterator[ContextSearch]:
    for mesh in contexts.meshes[1:3]:
        program = contexts.on(mesh, COUNT)
        if program is not None:
            yield contexts.search(program, mesh, COUNT)


def assert_alike(one: ContextSearch, other: ContextSearch) -> None:
    mine, its = one.layouts.model(), other.layouts.model()
    assert mine.variables == its.variables
    for term, same in zip(mine.terms, its.terms, strict=True):
        for (costs, legal), (expected, allowed) in zip(
            term.alternatives, same.alternatives, strict=True
        ):
            np.testing.assert_array_equal(costs, expected)
            np.testing.assert_array_equal(legal, allowed)


@pytest.mark.slow
def test_shared_prices_are_those_that_each_program_has_alone() -> None:
    known, compared = Known(), 0
    first = asked(CLUSTERS[0])
    for cluster in CLUSTERS:
        request = replace(first, machine=DataSheets(load_cluster(cluster)))
        for shared, alone in zip(
            contexts_of(request, known), contexts_of(request, Known()), strict=True
        ):
            for one, other in zip(searches(shared), searches(alone), strict=True):
                assert_alike(one, other)
                compared += 1
    assert compared > 2 * len(CLUSTERS)


@pytest.mark.slow
def test_prices_of_other_links_are_told_apart() -> None:
    """The comparison sees prices that are of another cluster."""
    request, known = asked(CLUSTERS[0]), Known()
    other = replace(request, machine=DataSheets(load_cluster(CLUSTERS[1])))
    (near, far) = (
        next(searches(Contexts(own, base_of(own), shared=known))) for own in (request, other)
    )
    with pytest.raises(AssertionError):
        assert_alike(near, far)
