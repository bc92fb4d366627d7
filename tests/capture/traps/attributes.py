"""State in attributes, slots, objects in containers, classes and arrays."""

import enum
import types
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.capture.traps import torchish
from tests.capture.traps.corpus import equal, refused
from tests.capture.traps.nets import Net

Made = tuple[nn.Module, dict[str, Tensor]]
NEXT = " and then does something else in the next call"
LATER = " and then does something else in a later call"


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-2.0, 2.0, 12).reshape(3, 4)}


def net(body: Any, **attributes: Any) -> Made:
    model = Net(body)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model, batch()


class Slotted:
    __slots__ = ("__hidden", "count")

    def __init__(self) -> None:
        self.count = 0
        self.__hidden = 0

    def __call__(self) -> int:
        self.__hidden += 1
        return self.__hidden


@dataclass(frozen=True)
class Frozen:
    counts: list[int] = field(default_factory=lambda: [0])


class Policy:
    seen = 0

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.count = inner, 0

    def step(self) -> int:
        self.count += 1
        return self.count

    @classmethod
    def of_class(cls) -> int:
        cls.seen += 1
        return cls.seen


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


def scaled(self: Any, x: Tensor, by: Any) -> Tensor:
    return (self.a(x) * by).square().mean()  # type: ignore[no-any-return]


@refused(r"forward changes self\.part\.count" + NEXT)
def in_a_slot() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.part.count += 1
        return scaled(self, x, self.part.count)

    return net(body, part=Slotted())


@refused(r"forward changes self\.part\._Slotted__hidden" + NEXT)
def in_a_private_slot_of_a_callable() -> Made:
    return net(lambda self, x: scaled(self, x, self.part()), part=Slotted())


@refused(r"forward changes self\.parts\[1\]\.count" + NEXT)
def in_an_object_in_a_list() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        return scaled(self, x, self.parts[1].step())

    return net(body, parts=[None, Policy()])


@refused(r"forward changes self\.parts\['a'\]\[0\]\.count" + NEXT)
def in_an_object_in_a_tuple_in_a_dict() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        return scaled(self, x, self.parts["a"][0].step())

    return net(body, parts={"a": (Policy(),)})


@refused(r"forward changes self\.part\.inner\.inner\.inner\.count" + NEXT)
def in_a_chain_of_four() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        return scaled(self, x, self.part.inner.inner.inner.step())

    return net(body, part=Policy(Policy(Policy(Policy()))))


@refused(r"forward changes Policy\.seen" + NEXT)
def in_the_class_of_an_object() -> Made:
    return net(lambda self, x: scaled(self, x, self.part.of_class()), part=Policy())


@refused(r"forward changes self\.part\.counts" + NEXT)
def in_a_frozen_dataclass() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.part.counts[0] += 1
        return scaled(self, x, self.part.counts[0])

    return net(body, part=Frozen())


@refused(r"forward changes self\.counts" + NEXT)
def in_an_array() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return scaled(self, x, float(self.counts[0]))

    return net(body, counts=numpy.zeros(3))


@refused(r"forward changes self\.counts")
def in_an_array_that_a_tensor_shares() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = torch.from_numpy(self.counts.copy()).to(x.dtype)
        self.counts += 1
        return scaled(self, x, by)

    return net(body, counts=numpy.ones(4))


@refused(r"forward changes self\.part")
def in_a_number_of_numpy() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.part = self.part + 1
        return scaled(self, x, float(self.part))

    return net(body, part=numpy.int64(0))


@refused(r"forward changes self\.seen_ids" + NEXT)
def in_a_set() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.seen_ids.add(len(self.seen_ids))
        return scaled(self, x, len(self.seen_ids))

    return net(body, seen_ids=set())


@refused(r"forward changes self\.queue" + NEXT)
def in_a_deque() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.queue.rotate(1)
        return scaled(self, x, self.queue[0])

    return net(body, queue=deque([1.0, 2.0, 3.0]))


@refused(r"forward changes self\.table\.data" + NEXT)
def in_a_dict_of_a_users_class() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.table["n"] = self.table.get("n", 0) + 1
        return scaled(self, x, self.table["n"])

    return net(body, table=UserDict())


@refused(r"forward changes self\.phase" + NEXT)
def in_a_phase() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = 1.0 if self.phase is Phase.WARM else 2.0
        self.phase = Phase.HOT
        return scaled(self, x, by)

    return net(body, phase=Phase.WARM)


@refused(r"forward changes self\.phase" + NEXT)
def in_the_third_of_three_phases() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = 2.0 if self.phase == "c" else 1.0
        self.phase = {"a": "b", "b": "c", "c": "a"}[self.phase]
        return scaled(self, x, by)

    return net(body, phase="a")


@refused(r"forward changes self\.notes" + LATER)
def in_the_length_of_a_list() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.notes.append(0)
        return scaled(self, x, 1.0 if len(self.notes) < 50 else 2.0)

    return net(body, notes=[])


@refused(r"forward changes self\.rate" + LATER)
def in_a_rate_that_decays() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.rate *= 0.99
        return scaled(self, x, 1.0 if self.rate > 0.1 else 2.0)

    return net(body, rate=1.0)


@refused(r"forward changes self\.calls" + LATER)
def in_every_hundredth_call() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return scaled(self, x, 2.0 if self.calls % 100 == 0 else 1.0)

    return net(body, calls=0)


@refused(r"forward changes self\.calls" + LATER)
def in_the_first_of_a_thousand_calls() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        by = 2.0 if self.calls and self.calls % 1000 == 0 else 1.0
        self.calls += 1
        return scaled(self, x, by)

    return net(body, calls=0)


@refused(r"forward changes self\.calls" + LATER)
def in_a_count_down() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls -= 1
        return scaled(self, x, 2.0 if self.calls < 0 else 1.0)

    return net(body, calls=40)


@refused(r"Net: forward changes self\.warming\.policy\.count" + NEXT)
def in_a_file_with_a_name_like_torchs() -> Made:
    return net(lambda self, x: self.warming(self.a(x)).sum(), warming=torchish.Warming())


@refused(r"forward changes self\.first" + NEXT)
def in_a_buffer_made_of_the_first_batch() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", self.a(x).detach().mean(0))
        return (self.a(x) - self.first).square().mean()  # type: ignore[no-any-return]

    return net(body)


@refused(r"self\.first" + NEXT)
def in_a_tensor_made_of_the_first_batch() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.mean(0)
        return (self.a(x) - self.first).square().mean()  # type: ignore[no-any-return]

    return net(body, first=None)


@refused(r"self\.frozen" + NEXT)
def in_a_copy_of_a_weight() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.frozen is None:
            self.frozen = self.a.weight.detach().clone()
        return (x @ self.frozen + self.b(x)).square().mean()  # type: ignore[no-any-return]

    return net(body, frozen=None)


@refused(r"self\.part\.last" + NEXT)
def in_a_tensor_in_a_namespace() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if hasattr(self.part, "last"):
            h = h + self.part.last[0]
        self.part.last = (h.detach(),)
        return h.square().mean()  # type: ignore[no-any-return]

    return net(body, part=types.SimpleNamespace())


@refused(r"(mutated|changes self\.scale)")
def in_a_tensor_written_in_place() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.scale.add_(1)
        return scaled(self, x, self.scale)

    return net(body, scale=torch.ones(4))


@refused(r"forward changes self\.hidden\.calls" + NEXT)
def in_a_module_in_a_list() -> Made:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model, inputs = net(lambda self, x: self.hidden(self.a(x)).sum())
    object.__setattr__(model, "hidden", Hidden())
    return model, inputs


@equal
def a_count_in_a_slot_that_nobody_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.part.count += 1
        return scaled(self, x, 2.0)

    return net(body, part=Slotted())


@equal
def lists_of_losses_that_nobody_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        loss = scaled(self, x, 2.0)
        self.log["losses"].append(loss.detach())
        self.last = loss.detach()
        return loss

    return net(body, log={"losses": []}, last=None)


@equal
def counts_that_are_only_printed() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        self.log = f"call {self.calls}, {self.calls * 3} samples"
        return scaled(self, x, 2.0)

    return net(body, calls=0, log="")


@equal
def moments_of_an_array_that_nobody_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.counts += 1
        return scaled(self, x, 2.0)

    return net(body, counts=numpy.zeros(3))


@equal
def a_record_that_forgets() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.record[len(self.record)] = tuple(x.shape)
        if len(self.record) > 3:
            self.record.popitem(last=False)
        return scaled(self, x, 2.0)

    return net(body, record=OrderedDict())


@equal
def outputs_of_the_last_call() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        self.part.hidden = [h, (h.detach(), {"h": h})]
        return self.part.hidden[0].square().mean()  # type: ignore[no-any-return]

    return net(body, part=types.SimpleNamespace(hidden=[]))


@equal
def a_large_integer() -> Made:
    """Python refuses to write it in decimal."""
    return net(lambda self, x: scaled(self, self.note(x), 1), note=Noting(), large=10**5000)


class Noting:
    """Keeps the last shape, and a number that nobody reads."""

    def __init__(self) -> None:
        self.last: tuple[int, ...] = ()
        self.large = 10**5000

    def __call__(self, h: Tensor) -> Tensor:
        self.last = tuple(h.shape)
        return h.tanh()
