"""Clocks and sources of the system that forward or the loss function asks."""

import datetime
import os
import secrets
import time
import uuid
from datetime import date
from random import SystemRandom
from time import perf_counter
from typing import Any

from torch import Tensor

from tests.capture.traps.attributes import Made, net, scaled
from tests.capture.traps.corpus import equal, refused

START = time.monotonic()


@refused(r"all that it has asked is time\.time;")
def a_scale_by_the_hour() -> Made:
    return net(lambda self, x: scaled(self, x, time.time()))


@refused(r"all that it has asked is time\.monotonic;")
def a_warm_up_in_seconds() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        return scaled(self, x, 1.0 if time.monotonic() - START < 3600 else 2.0)

    return net(body)


@refused(r"all that it has asked is time\.perf_counter;")
def a_clock_by_its_own_name() -> Made:
    return net(lambda self, x: scaled(self, x, perf_counter()))


@refused(r"draws from os\.urandom")
def bytes_of_the_system() -> Made:
    return net(lambda self, x: scaled(self, x, float(os.urandom(1)[0])))


@refused(r"draws from uuid\.uuid4")
def a_new_name() -> Made:
    return net(lambda self, x: scaled(self, x, float(uuid.uuid4().int % 7)))


@refused(r"all that it has asked is datetime\.datetime\.now;")
def a_scale_by_the_date() -> Made:
    return net(lambda self, x: scaled(self, x, float(datetime.datetime.now().toordinal())))


@refused(r"all that it has asked is datetime\.date\.today;")
def a_date_by_its_own_name() -> Made:
    return net(lambda self, x: scaled(self, x, float(date.today().toordinal())))


@refused(r"all that it has asked is time\.localtime;")
def a_day_of_the_year() -> Made:
    return net(lambda self, x: scaled(self, x, float(time.localtime().tm_yday)))


@refused(r"all that it has asked is time\.time;")
def a_clock_in_an_attribute() -> Made:
    return net(lambda self, x: scaled(self, x, self.clock()), clock=time.time)


@refused(r"all that it has asked is time\.monotonic;")
def a_clock_in_a_closure() -> Made:
    clock = time.monotonic
    return net(lambda self, x: scaled(self, x, clock()))


@refused(r"draws from secrets\.randbelow")
def a_secret() -> Made:
    return net(lambda self, x: scaled(self, x, float(secrets.randbelow(100))))


@equal
def a_date_that_is_noted() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.at = datetime.datetime.now().isoformat()
        assert isinstance(self.begin, datetime.datetime)
        return scaled(self, x, 2.0)

    return net(body, at="", begin=datetime.datetime(2020, 1, 1))


@equal
def a_source_of_the_system_that_nobody_asks() -> Made:
    return net(lambda self, x: scaled(self, x, 2.0), source=SystemRandom())


@equal
def a_stopwatch() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        loss = scaled(self, x, 2.0)
        self.took_s = time.perf_counter() - begin
        return loss

    return net(body, took_s=0.0)
