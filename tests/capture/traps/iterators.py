"""Iterators and generators that forward advances."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.capture.traps.attributes import LATER, NEXT, Made, net, scaled
from tests.capture.traps.corpus import equal, refused

COUNTER = itertools.count()


def drawn(self: Any, x: Tensor) -> Tensor:
    return scaled(self, x, float(next(self.source)))


def counting() -> Iterator[int]:
    yield from itertools.count()


def same() -> Iterator[int]:
    for value in [1, 1, 2]:  # noqa: UP028 - the loop's iterator has no name
        yield value


@refused(r"self\.source" + NEXT)
def of_a_list() -> Made:
    return net(drawn, source=iter([1.0, 2.0, 3.0, 4.0]))


@refused(r"self\.source" + NEXT)
def of_a_range_with_equal_beginnings() -> Made:
    return net(drawn, source=iter((1.0, 1.0, 2.0, 3.0)))


@refused(r"self\.source" + NEXT)
def of_a_count() -> Made:
    return net(drawn, source=itertools.count())


@refused(r"advances the iterator self\.source")
def of_a_cycle() -> Made:
    return net(drawn, source=itertools.cycle([1.0, 2.0]))


@refused(r"advances the iterator self\.source")
def of_a_generator() -> Made:
    return net(drawn, source=counting())


@refused(r"advances the iterator self\.source")
def of_a_generator_whose_variables_stay() -> Made:
    source = same()
    next(source)
    return net(drawn, source=source)


@refused(r"advances the iterator self\.source")
def of_pairs() -> Made:
    return net(
        lambda self, x: scaled(self, x, next(self.source)[0]), source=enumerate([5, 6, 7, 8])
    )


@refused(r"iterators\w*\.COUNTER" + LATER)
def of_a_global_count() -> Made:
    return net(lambda self, x: scaled(self, x, 2.0 if next(COUNTER) > 70 else 1.0))


@refused(r"draws from self\.parts\[0\]")
def of_random_numbers_in_a_list() -> Made:
    return net(lambda self, x: scaled(self, x, self.parts[0].random()), parts=[Random(1)])


@refused(r"draws from closure of .*: source")
def of_random_numbers_in_a_closure() -> Made:
    source = numpy.random.default_rng(1)
    return net(lambda self, x: scaled(self, x, source.random()))


@equal
def a_count_that_nobody_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        next(self.source)
        return scaled(self, x, 2.0)

    return net(body, source=itertools.count())


@equal
def an_iterator_that_begins_anew() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.source = iter(self.values)
        return scaled(self, x, sum(self.source))

    return net(body, source=None, values=[1.0, 2.0])


@equal
def an_iterator_that_nobody_advances() -> Made:
    return net(lambda self, x: scaled(self, x, torch.ones(4)), source=itertools.cycle([1, 2]))
