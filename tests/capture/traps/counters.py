"""Counters that decide something at a call of any number, and counters that decide nothing."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.capture.traps.attributes import Made, Policy, net, scaled
from tests.capture.traps.corpus import equal, refused

THEN = r" and then (does something else in|reads another value)"
CALLS = r"forward changes self\.calls" + THEN
LIMITS = {"warm-up": 3777}


def counted(decide: Callable[[Any], Any], start: Any = 0, step: Any = 1, **more: Any) -> Made:
    """The loss is scaled by a function of the module, after it has counted."""

    def body(self: Any, x: Tensor) -> Tensor:
        self.calls += step
        return scaled(self, x, decide(self))

    return net(body, calls=start, **more)


def is_late(calls: Any) -> bool:
    return bool(calls >= 2377)


@refused(CALLS)
def in_the_seventh_call() -> Made:
    return counted(lambda self: 2.0 if self.calls == 7 else 1.0)


@refused(CALLS)
def between_two_calls() -> Made:
    return counted(lambda self: 2.0 if 2000 < self.calls < 5000 else 1.0)


@refused(CALLS)
def in_every_37th_call() -> Made:
    return counted(lambda self: 2.0 if self.calls % 37 == 0 else 1.0)


@refused(CALLS)
def in_call_that_an_attribute_names() -> Made:
    return counted(lambda self: 2.0 if self.calls == self.warmup else 1.0, warmup=3777)


@refused(CALLS)
def in_a_call_that_two_attributes_name() -> Made:
    return counted(
        lambda self: 2.0 if self.calls > self.epochs * self.steps + 3 else 1.0, epochs=7, steps=311
    )


@refused(CALLS)
def in_a_call_that_a_global_names() -> Made:
    return counted(lambda self: 2.0 if self.calls > LIMITS["warm-up"] else 1.0)


@refused(CALLS)
def in_a_function_of_the_file() -> Made:
    return counted(lambda self: 2.0 if is_late(self.calls) else 1.0)


@refused(CALLS)
def by_a_sum_of_floats() -> Made:
    return counted(lambda self: 2.0 if self.calls > 12.3 else 1.0, start=0.0, step=0.1)


@refused(CALLS)
def far_beyond_what_is_followed() -> Made:
    return counted(lambda self: 2.0 if self.calls == 54_321_987 else 1.0)


@refused(CALLS)
def by_bits() -> Made:
    return counted(lambda self: 2.0 if self.calls & 512 else 1.0)


@refused(CALLS)
def by_quotients() -> Made:
    return counted(lambda self: 2.0 if (self.calls // 50) % 3 == 2 else 1.0)


@refused(CALLS)
def by_membership() -> Made:
    return counted(lambda self: 2.0 if self.calls in (200, 900) else 1.0)


@refused(CALLS)
def by_membership_of_a_set() -> Made:
    return counted(lambda self: 2.0 if self.calls in {200, 900} else 1.0)


@refused(CALLS)
def by_a_table_of_scales() -> Made:
    table = [1.0] * 40 + [2.0]
    return counted(lambda self: table[min(self.calls, 40)])


@refused(CALLS)
def by_a_table_that_comes_again() -> Made:
    table = [1.0] * 50 + [2.0]
    return counted(lambda self: table[self.calls % 51])


@refused(CALLS)
def by_an_exponential() -> Made:
    return counted(lambda self: 2.0 if math.exp(-self.calls / 1000) < 0.5 else 1.0)


@refused(CALLS)
def by_a_ramp_that_ends() -> Made:
    return counted(lambda self: max(1.0, self.calls / 1000))


@refused(CALLS)
def by_the_truth_of_a_remainder() -> Made:
    return counted(lambda self: 1.0 if self.calls % 301 else 2.0)


@refused(CALLS)
def by_a_type_of_torch() -> Made:
    return counted(lambda self: torch.full((), self.calls // 700))


@refused(CALLS)
def by_a_slice() -> Made:
    return counted(lambda self: torch.ones(5000)[: self.calls + 10].numel() // 4000 + 1)


@refused(CALLS)
def with_an_error_at_the_end() -> Made:
    def decide(self: Any) -> float:
        if self.calls > 600:
            raise RuntimeError("too many calls")
        return 1.0

    return counted(decide)


@refused(CALLS)
def by_a_recurrence() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls = (self.calls * 5 + 3) % 1021
        return scaled(self, x, 2.0 if self.calls == 987 else 1.0)

    return net(body, calls=0)


@refused(r"changes self\.calls, self\.hot" + THEN)
def by_a_flag_that_the_call_before_set() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = 2.0 if self.hot else 1.0
        self.calls += 1
        self.hot = self.calls > 300
        return scaled(self, x, by)

    return net(body, calls=0, hot=False)


@refused(r"changes self\.calls, self\.stage" + THEN)
def by_a_stage_that_comes_late() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 100 == 0:
            self.stage += 1
        return scaled(self, x, 2.0 if self.stage == 9 else 1.0)

    return net(body, calls=0, stage=0)


@refused(r"forward changes self\.calls, self\.state" + THEN)
def by_a_copy_in_a_dict_that_is_made_anew() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = 2.0 if self.state.get("n", 0) == 77 else 1.0
        self.calls += 1
        self.state = {"n": self.calls}
        return scaled(self, x, by)

    return net(body, calls=0, state={})


@refused(r"forward changes self\.pair" + THEN)
def in_a_tuple() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.pair = (self.pair[0] + 1, "calls")
        return scaled(self, x, 2.0 if self.pair[0] == 77 else 1.0)

    return net(body, pair=(0, "calls"))


@refused(r"forward changes self\.parts\[0\]\.count" + THEN)
def in_an_object_in_a_list() -> Made:
    return net(
        lambda self, x: scaled(self, x, 2.0 if self.parts[0].step() == 77 else 1.0),
        parts=[Policy()],
    )


@refused(r"Policy\.seen" + THEN)
def in_a_class() -> Made:
    return net(
        lambda self, x: scaled(self, x, 2.0 if self.part.of_class() == 77 else 1.0), part=Policy()
    )


@equal
def by_a_recurrence_that_never_comes_there() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls = (self.calls * 5 + 3) % 1021
        return scaled(self, x, 2.0 if self.calls == 500 else 1.0)

    return net(body, calls=0)


@equal
def that_says_something_at_times() -> Made:
    def decide(self: Any) -> float:
        if self.calls % 100 == 0 or self.calls == 3:
            self.said = "call %d of %s" % (self.calls, f"{self.total:05d}")  # noqa: UP031
        return 1.0

    return counted(decide, said="", total=70_000)


@equal
def that_is_compared_to_nothing() -> Made:
    def decide(self: Any) -> float:
        if self.calls is None or self.calls < 0 or not isinstance(self.calls, int):
            raise ValueError("impossible")
        return 1.0

    return counted(decide)


@equal
def of_which_a_mean_is_kept() -> Made:
    def decide(self: Any) -> float:
        self.rate = 0.9 * self.rate + 0.1 * self.calls
        self.largest = max(self.rate, 2.0)
        self.sizes.append(self.calls * 2)
        return 1.0

    return counted(decide, rate=0.0, largest=0.0, sizes=[])


@equal
def that_names_what_is_kept() -> Made:
    def decide(self: Any) -> float:
        self.ring[self.calls % 4] = self.calls
        return 1.0

    return counted(decide, ring=[0, 0, 0, 0])


@equal
def that_turns_around() -> Made:
    """One of three ways, which are equal."""

    def decide(self: Any) -> float:
        scales: list[float] = [1.0, 1.0, 1.0]
        scale: float = scales[self.calls % 3]
        return scale

    return counted(decide)


@equal
def that_begins_anew() -> Made:
    def decide(self: Any) -> float:
        if self.calls >= 500:
            self.calls = 0
            self.epochs += 1
        return 1.0

    return counted(decide, epochs=0)


@equal
def that_clears_a_cache() -> Made:
    def decide(self: Any) -> Any:
        if self.mask is None or self.calls % 64 == 0:
            self.mask = torch.ones(4).cumsum(0)
        return self.mask

    return counted(decide, mask=None)


@equal
def that_torch_is_given_for_a_note() -> Made:
    def decide(self: Any) -> float:
        self.note = self.a.weight.detach().mean() * (self.calls > 10)
        return 1.0

    return counted(decide, note=None)
