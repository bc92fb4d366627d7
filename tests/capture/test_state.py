"""Numbers that note what is read of them, the calls to come, clocks, and bits of constants."""

import builtins
import operator
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture, program
from parloom.capture.constants import same_tensor
from parloom.capture.state.clocks import asked
from parloom.capture.state.numbers import Number, Reads
from parloom.capture.state.paths import Path, Paths, State
from parloom.capture.state.reach import walk
from parloom.capture.state.snapshot import Snapshot
from tests.capture.traps import attributes, caches, counters
from tests.capture.traps.attributes import net, scaled

OPERATIONS: list[Callable[[Any], Any]] = [
    lambda n: n + 1, lambda n: 1 - n, lambda n: n * 2.5, lambda n: n / 7, lambda n: n // 3,
    lambda n: n % 5, lambda n: 2**n, lambda n: n & 6, lambda n: n | 1, lambda n: n ^ 3,
    lambda n: n << 2, lambda n: n >> 1, operator.neg, operator.pos, abs, operator.invert,
    round, lambda n: divmod(n, 4)[1], lambda n: divmod(50, n)[0], lambda n: n * n - n,
]  # fmt: skip


def path(value: Any, call: Callable[[Any], Any]) -> tuple[Reads, Any]:
    """What a function reads of a number, and what it makes of it."""
    reads = Reads(active=True)
    return reads, call(Number.variable(0, value, reads))


@pytest.mark.parametrize("call", OPERATIONS)
def test_terms_are_those_of_the_operation(call: Callable[[Any], Any]) -> None:
    reads, result = path(3, call)
    assert not reads.found
    assert result.value == call(3)
    assert [result.term({0: n}) for n in range(1, 60)] == [call(n) for n in range(1, 60)]


@pytest.mark.parametrize(
    ("call", "same", "others"),
    [
        (lambda n: n > 7, range(1, 8), (8, 9)),
        (lambda n: n == 3, (3,), (2, 4)),
        (lambda n: 2 < n < 6, (3, 4, 5), (2, 6)),
        (lambda n: bool(n % 4), (1, 2, 3, 5), (4, 8)),
        (lambda n: [0, 1, 2, 3, 4, 5][n], (3,), (2, 4)),
        ({3: 1}.get, (3,), (2, 4)),
        (lambda n: n in (5, 7), (3, 4, 6), (5, 7)),
        (lambda n: torch.ones(9)[:n], (3,), (2, 4)),
        (lambda n: torch.ones(2) * n, (3,), (2, 4)),
        (float, (3,), (2, 4)),
        (lambda n: n.bit_length(), (3,), (2, 4)),
        (lambda n: min(n, 5), (1, 4), (6, 9)),
    ],
)
def test_what_is_read_holds_for_some_numbers(
    call: Callable[[Any], Any], same: Any, others: Any
) -> None:
    reads, _ = path(3, call)
    assert all(reads.hold({0: n}) for n in same)
    assert not any(reads.hold({0: n}) for n in others)


def test_text_and_places_read_nothing() -> None:
    kept: dict[Any, int] = {}

    def call(n: Any) -> str:
        kept[n] = 1
        return f"{n:03d} {n}" + "%d" % n + str(n)  # noqa: UP031

    assert path(3, call)[0].found == []


def first_unknown(update: Callable[[Any], Any], read: Callable[[Any], Any], start: Any) -> Any:
    """The number with which a call first goes another way."""
    reads = Reads(active=True)
    number = Number.variable(0, start, reads)
    read(number)
    after = update(number)
    found = State({0: start}, "rest")
    paths = Paths([Path(found, reads, {0: after.term}, "rest")])
    unknown = paths.unknown(found)
    return None if unknown is None else unknown[0].values[0]


@pytest.mark.parametrize(
    ("update", "read", "expected"),
    [
        (lambda n: n + 1, lambda n: n == 37, 37),
        (lambda n: n + 2, lambda n: n > 4000, 4002),
        (lambda n: (n + 1) % 10, lambda n: n == 37, None),
        (lambda n: (n * 5 + 3) % 1021, lambda n: n == 987, 987),
        (lambda n: n + 1, lambda n: n == 50_000_003, 50_000_003),
        (lambda n: n + 1, str, None),
        (lambda n: n * 3, lambda n: n > 10**30, 3**63),
    ],
)
def test_calls_are_followed_to_the_first_that_differs(
    update: Any, read: Any, expected: int | None
) -> None:
    assert first_unknown(update, read, 0 if expected != 3**63 else 3) == expected


def traces(monkeypatch: pytest.MonkeyPatch, made: tuple[nn.Module, dict[str, Tensor]]) -> int:
    """How often a model is traced, for training."""
    count, export = [0], program.export

    def counted(*args: Any) -> Any:
        count[0] += 1
        return export(*args)

    monkeypatch.setattr(program, "export", counted)
    capture(*made)
    return count[0]


@pytest.mark.parametrize(
    ("build", "most"),
    [
        (attributes.outputs_of_the_last_call, 2),
        (attributes.a_count_in_a_slot_that_nobody_reads, 2),
        (caches.a_cached_function, 2),
        (caches.a_rotary_table_in_an_object, 2),
        (counters.that_is_compared_to_nothing, 2),
        (counters.that_turns_around, 4),
        (attributes.lists_of_losses_that_nobody_reads, 8),
    ],
)
def test_no_call_is_traced_that_tells_nothing(
    build: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert traces(monkeypatch, build()) <= most


def test_a_large_container_is_one_part() -> None:
    words = {f"word {i}": i for i in range(2000)}
    model, _ = net(lambda self, x: scaled(self, x, 1.0), words=words, pairs=[("a", 1)] * 2000)
    before = Snapshot.of(model, None)
    assert sum(len(parts) for parts in before.parts.values()) < 1000
    words["word 7"], words["more"] = -1, 1
    after = Snapshot.of(model, None)
    changed = after.changes(before)
    assert [held.found for held in changed.values()] == ["self.words"]
    before.put(changed)
    assert words == {f"word {i}": i for i in range(2000)}


def test_clocks_of_other_threads_stay() -> None:
    model, _ = net(lambda self, x: scaled(self, x, 1.0))
    seen: list[float] = []
    now = time.time()
    with asked(Snapshot.of(model, None), 100_000) as found:
        thread = threading.Thread(target=lambda: seen.append(time.time()))
        thread.start()
        thread.join()
        own = time.time()
    assert abs(seen[0] - now) < 50_000 < own - now
    assert found == {"time.time"}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([-torch.inf]), torch.tensor([torch.finfo().min]), False),
        (torch.tensor([torch.inf]), torch.tensor([torch.finfo().max]), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (torch.tensor([torch.nan]), torch.tensor([0.0]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), True),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous(), True),
        (torch.tensor(True), torch.tensor(True), True),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_constants_are_compared_by_bits(one: Tensor, other: Tensor, same: bool) -> None:
    assert same_tensor(one, other) is same


def test_what_a_shell_adds_to_python_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython puts functions among Python's own names; all of a notebook hangs on them."""
    shell = FunctionType((lambda: far).__code__, {"__name__": "shell", "far": object()}, "display")  # type: ignore[name-defined] # noqa: F821
    monkeypatch.setattr(builtins, "display", shell, raising=False)
    reached = [value for _, value, _ in walk(nn.Linear(2, 2)).steps()]
    assert not any(value is shell for value in reached)
