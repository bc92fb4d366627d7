"""State in memory that threads, processes and C share, in files, and in large containers."""

import array
import builtins
import contextvars
import ctypes
import functools
import io
import multiprocessing
import threading
import weakref
from collections import ChainMap, Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.capture.traps.attributes import Made, Policy, net, scaled
from tests.capture.traps.corpus import equal, refused

THEN = r".* and then (does something else in|reads another value)"
CALLS = contextvars.ContextVar("CALLS", default=0)


class Local(threading.local):
    count = 0


class Unwilling:
    """As lazy proxies and placeholders do, raises whatever it is asked for."""

    __slots__ = ("count",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody may ask for {name}")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nobody may ask for the class")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class Loading(dict[str, float]):
    """Loads in another way whenever it is walked."""

    def items(self) -> Any:
        raise RuntimeError("nothing is loaded yet")

    __iter__ = __len__ = keys = values = items


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))


@refused(r"forward changes self\.local\.count" + THEN)
def in_memory_of_a_thread() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.local.count += 1
        return scaled(self, x, 2.0 if self.local.count == 7 else 1.0)

    local = threading.local()
    local.count = 0
    return net(body, local=local)


@refused(r"forward changes self\.local\.count" + THEN)
def in_memory_of_a_thread_of_a_users_class() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.local.count += 1
        return scaled(self, x, float(self.local.count))

    return net(body, local=Local())


@refused(r"forward changes self\.shared" + THEN)
def in_memory_of_processes() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.shared.value += 1
        return scaled(self, x, self.shared.value)

    return net(body, shared=multiprocessing.Value("i", 0))


@refused(r"forward changes self\.shared" + THEN)
def in_an_array_of_processes() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.shared[1] += 1
        return scaled(self, x, self.shared[1])

    return net(body, shared=multiprocessing.Array("d", 3))


@refused(r"forward changes self\.numbers" + THEN)
def in_an_array_of_python() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.numbers[0] += 1
        return scaled(self, x, self.numbers[0])

    return net(body, numbers=array.array("d", [0.0, 1.0]))


@refused(r"forward changes self\.numbers" + THEN)
def in_bytes_that_are_seen_in_another_way() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.numbers[0] += 1
        return scaled(self, x, self.numbers[0])

    return net(body, numbers=memoryview(bytearray(8)))


@refused(r"forward changes self\.pair" + THEN)
def in_a_structure_of_c() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.pair.b += 1.0
        return scaled(self, x, self.pair.b)

    return net(body, pair=Pair())


@refused(r"forward writes to self\.table")
def in_a_large_array() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.table[5, 5] += 1
        return scaled(self, x, float(self.table[5, 5]))

    return net(body, table=numpy.zeros((1024, 1024)))


@refused(r"CALLS" + THEN)
def in_a_variable_of_a_context() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return scaled(self, x, CALLS.get())

    return net(body)


@refused(r"changes .*count" + THEN)
def in_an_object_that_is_referred_to() -> Made:
    policy = Policy()

    def body(self: Any, x: Tensor) -> Tensor:
        found = self.reference()
        return scaled(self, x, found.step())

    return net(body, reference=weakref.ref(policy), policy=policy)


@refused(r"forward changes self\.words" + THEN)
def in_a_counter_of_words() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.words["calls"] += 1
        return scaled(self, x, 2.0 if self.words["calls"] == 9 else 1.0)

    return net(body, words=Counter())


@refused(r"forward changes self\.maps" + THEN)
def in_a_chain_of_maps() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.maps["calls"] = self.maps.get("calls", 0) + 1
        return scaled(self, x, 2.0 if self.maps["calls"] == 9 else 1.0)

    return net(body, maps=ChainMap({}, {"calls": 0}))


@refused(r"forward changes .*" + THEN)
def in_what_a_partial_binds() -> Made:
    def step(state: Any) -> float:
        state.count += 1
        return float(state.count)

    return net(
        lambda self, x: scaled(self, x, self.step()),
        step=functools.partial(step, SimpleNamespace(count=0)),
    )


@refused(r"forward changes self\.words" + THEN)
def in_a_large_dict() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.words["7"] = -self.words["7"]
        return scaled(self, x, self.words["7"])

    return net(body, words={str(i): i for i in range(5000)})


@refused(r"advances the iterator self\.text")
def in_a_text_that_is_read() -> Made:
    return net(
        lambda self, x: scaled(self, x, float(self.text.readline())),
        text=io.StringIO("1\n1\n1\n1\n1\n1\n2\n"),
    )


@refused(r"forward changes torch\._calls" + THEN)
def in_an_attribute_of_torch() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        torch._calls += 1  # type: ignore[attr-defined]
        return scaled(self, x, 2.0 if torch._calls == 9 else 1.0)  # type: ignore[attr-defined]

    torch._calls = 0  # type: ignore[attr-defined]
    return net(body)


@refused(r"forward changes torch\.nn\.functional\._policy.*count" + THEN)
def in_an_object_that_a_file_of_torch_holds() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        return scaled(self, x, torch.nn.functional._policy.step())  # type: ignore[attr-defined]

    torch.nn.functional._policy = Policy()  # type: ignore[attr-defined]
    return net(body)


@refused(r"forward changes builtins\.calls" + THEN)
def in_a_builtin() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        builtins.calls += 1  # type: ignore[attr-defined]
        return scaled(self, x, builtins.calls)  # type: ignore[attr-defined]

    builtins.calls = 0  # type: ignore[attr-defined]
    return net(body)


@refused(r"draws from open")
def in_a_file_that_is_read_anew() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        with open(__file__) as file:
            return scaled(self, x, float(len(file.readline()) > 0))

    return net(body)


@refused(r"draws from open")
def in_a_file_that_pathlib_reads() -> Made:
    return net(lambda self, x: scaled(self, x, float(len(Path(__file__).read_text()))))


@refused(r"draws from os\.(path\.exists|stat)")
def in_a_file_that_may_be_there() -> Made:
    return net(lambda self, x: scaled(self, x, 2.0 if Path("/nowhere/stop").exists() else 1.0))


@equal
def a_file_that_the_first_call_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(len(Path(__file__).read_text()) > 0)
        return scaled(self, x, self.scale)

    return net(body, scale=None)


@equal
def a_vocabulary_beside_a_counter() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return scaled(self, x, self.words["7"])

    return net(body, calls=0, words={str(i): i for i in range(50_000)})


@equal
def a_placeholder_that_raises() -> Made:
    part: Any = Unwilling()
    part.count = 0

    def body(self: Any, x: Tensor) -> Tensor:
        part.count += 1
        return scaled(self, x, 2.0)

    return net(body)


@refused(r"forward changes .*part\.count" + THEN)
def in_a_placeholder_that_raises() -> Made:
    part: Any = Unwilling()
    part.count = 0

    def body(self: Any, x: Tensor) -> Tensor:
        part.count += 1
        return scaled(self, x, part.count)

    return net(body)


@equal
def a_dict_that_raises() -> Made:
    words = Loading(a=2.0)
    return net(lambda self, x: scaled(self, x, words["a"]))


@equal
def a_log_in_memory() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.log.write("call\n")
        return scaled(self, x, 2.0)

    return net(body, log=io.StringIO())


@equal
def a_lock_and_a_count() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        with self.lock:
            self.shared.value += 1
        return scaled(self, x, 2.0)

    return net(body, lock=threading.Lock(), shared=multiprocessing.Value("i", 0))


@equal
def a_large_array_that_is_read() -> Made:
    return net(
        lambda self, x: scaled(self, x, float(self.table[5, 5])), table=numpy.ones((1024, 1024))
    )


@equal
def a_window_of_sizes() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.window.append(x.shape[0])
        return scaled(self, x, 2.0)

    return net(body, window=deque(maxlen=3))


@equal
def the_memory_of_a_thread_that_nobody_reads() -> Made:
    def body(self: Any, x: Tensor) -> Tensor:
        self.local.count += 1
        return scaled(self, x, 2.0)

    return net(body, local=Local())
