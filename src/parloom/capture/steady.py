"""Modules that do something else in the next call: a trace would repeat the first one for ever.

Forward may draw from generators on the host, or keep something for the next call: a count, a tensor
or a list in an attribute of a module, of its class or of an object that it has, or in a global of
the file that it is from. Then the model is traced again, with what it wrote put there. It may draw
only if it seeds, which shows in where the generators end; it may write only if the program is the
same, and does not read a tensor that it writes anew. Counts are also tried far ahead.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from parloom.errors import CaptureError

PLAIN = (bool, int, float, str, type(None))
DICTS = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = (list, tuple, set, deque, *DICTS)  # of exactly these classes
LONGEST = 1000  # containers with more in them are tables, not notes for the next call
DEEPEST = 3
FAR = 1_000_000  # calls ahead that a count is tried
OWN = frozenset(vars(nn.Module()))  # parameters, hooks and the like
Key = tuple[str, str]  # how an error calls the owner, attribute


@dataclass(frozen=True, slots=True)
class Kept:
    """An attribute: who has it, its value, a copy of what is in that, and what tells it apart."""

    owner: Any
    value: Any
    contents: Any
    identity: object


@dataclass(frozen=True, slots=True)
class Program:
    """What a trace gave: its code, and the tensors it holds that are neither state nor batch."""

    code: str
    constants: tuple[Tensor, ...]


class Watch:
    """What one call of a model's forward changes outside of its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: dict[Key, Kept] = {}
        self.changed: dict[Key, Kept] = {}
        self.made: dict[Key, Kept] = {}
        self.drawn: frozenset[str] = frozenset()
        self.ends: dict[str, object] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the call: notes attributes that change, and generators with where they end."""
        self.before, generators = dict(attributes(self.model)), host_generators(self.model)
        try:
            yield
        except BaseException:
            changed, made = self.changes()
            restore(self.before, changed | made)
            raise
        self.ends = host_generators(self.model)
        self.drawn = frozenset(n for n, s in self.ends.items() if generators.get(n, s) != s)
        self.changed, self.made = self.changes()

    def changes(self) -> tuple[dict[Key, Kept], dict[Key, Kept]]:
        """What is not as before, and apart from that tensors that were not there at all."""
        now = dict(attributes(self.model))
        new = now.keys() - self.before.keys()
        made = {key: now[key] for key in new if isinstance(now[key].value, Tensor)}
        old = {k for k in now.keys() & self.before.keys()
               if now[k].identity != self.before[k].identity}  # fmt: skip
        return {key: now[key] for key in (new | old) - made.keys()}, made

    def check(self, code: str, again: Callable[[], Program]) -> None:
        """Raise `CaptureError` if `again`, which calls the model once more, is not `code`."""
        before, changed, made = self.before, self.changed, self.made
        drawn, ends = self.drawn, self.ends
        if not changed and not drawn and not made:
            return
        counts = {k for k, now in changed.items() if counted(before.get(k), now)}
        restore(before, changed | made)
        try:
            # a tensor that was not there is taken for one that is made once, if it is
            carried = self.replay(made, again)[1] if made else set()
            restore(before, made)
            second, also = Program(code, ()), set[Key]()
            if changed or drawn:
                second, also = self.replay(changed, again)
            carried |= also
            free = sorted(n for n in drawn if self.ends[n] != ends[n])
            differs = soon = second.code != code
            if counts and not differs:
                far = {k: replace(v, contents=v.contents + FAR) if k in counts else v
                       for k, v in changed.items()}  # fmt: skip
                differs = self.replay(far, again)[0].code != code
        finally:
            restore(before, changed | made)
        model = type(self.model).__name__
        if free:
            raise CaptureError(
                f"cannot capture {model}: forward draws from {' and '.join(free)}, and every"
                " step of a plan would repeat what it drew while it was captured; draw in the data"
                " loader and give the result in the batch, draw with torch.rand, or switch it off"
                " (layer drop, masking)"
            )
        if (differs and changed) or carried:
            owner, name = min(carried or changed)
            inside = isinstance((changed | made)[owner, name].owner, nn.Module)
            where = ".".join(part for part in (model, owner if inside else "") if part)
            what = f"self.{name}" if inside else f"{owner}.{name}"
            raise CaptureError(
                f"cannot capture {where}: forward changes {what} and then does something"
                f" else in {'the next' if soon or carried else 'a later'} call; keep"
                " such state in a buffer (register_buffer) or decide outside of forward"
            )

    def replay(
        self, changed: Mapping[Key, Kept], again: Callable[[], Program]
    ) -> tuple[Program, set[Key]]:
        """The next call with what one wrote, and which tensors it both reads and writes anew."""
        put: dict[Key, list[Tensor]] = {}
        for key, now in changed.items():
            write(now.owner, key[1], copied(now.contents, emptied_to(put.setdefault(key, []))))
        program = again()
        held = {id(t) for t in program.constants}
        read = {key for key, tensors in put.items() if any(id(t) in held for t in tensors)}
        return program, read & self.changed.keys()


def attributes(model: nn.Module) -> Iterator[tuple[Key, Kept]]:
    """Plain values, tensors and containers; neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and is_watched(value, Tensor):
                yield (path, name), kept(module, value)
    for label, owner in objects(model):
        for name, value in tuple(vars(owner).items()):
            if is_watched(value, Tensor):
                yield (label, name), kept(owner, value)
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    theirs = sorted(
        (k for k in kinds if issubclass(k, nn.Module) and not k.__module__.startswith("torch.")),
        key=lambda k: k.__qualname__,
    )
    files = {k.__module__: sys.modules[k.__module__] for k in theirs if k.__module__ in sys.modules}
    for label, owner in (*((k.__name__, k) for k in theirs), *sorted(files.items())):
        for name, value in tuple(vars(owner).items()):
            if not name.startswith("__") and is_watched(value):
                yield (label, name), kept(owner, value)


def objects(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects with attributes of their own that modules have, or that those have; each once."""
    seen: set[int] = set()
    found = [("self", path, vars(module)) for path, module in model.named_modules()]
    for depth in range(2):
        inner = []
        for above, path, content in found:
            for name, value in tuple(content.items()):
                own = depth > 0 or name not in OWN
                if not own or id(value) in seen or not is_object(value):
                    continue
                seen.add(id(value))
                label = f"{above}.{path}.{name}" if path else f"{above}.{name}"
                yield label, value
                inner.append((label, "", vars(value)))
        found = inner


def is_object(value: Any) -> bool:
    """Whether a value is an instance of a class that keeps attributes; torch's own aside."""
    kind = type(value)
    plain = isinstance(value, nn.Module | Tensor | type | ModuleType) or callable(value)
    return not plain and hasattr(value, "__dict__") and not kind.__module__.startswith("torch")


def kept(owner: Any, value: Any) -> Kept:
    """An attribute as it is now."""
    return Kept(owner, value, copied(value), identity(value))


def is_watched(value: Any, *others: type) -> bool:
    """Whether a value is of a kind that may change what the next call does."""
    return isinstance(value, (*PLAIN, *others)) or type(value) in CONTAINERS


def is_opened(value: Any, depth: int) -> bool:
    """Whether it matters what is in a value."""
    return type(value) in CONTAINERS and len(value) <= LONGEST and depth < DEEPEST


def identity(value: Any, depth: int = 0) -> object:
    """What differs exactly where the value does; tensors and objects are known by what they are."""
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value) if isinstance(value, float) else value
    if not is_opened(value, depth):
        return id(value), len(value) if type(value) in CONTAINERS else 0
    items = value.items() if isinstance(value, dict) else value
    found = [
        (key_of(item[0]), identity(item[1], depth + 1)) if isinstance(value, dict)
        else identity(item, depth + 1)
        for item in items
    ]  # fmt: skip
    return type(value).__name__, frozenset(found) if isinstance(value, set) else tuple(found)


def key_of(key: object) -> object:
    """A dict's key, told apart by kind."""
    return identity(key) if isinstance(key, PLAIN) else id(key)


def copied(value: Any, change: Callable[[Any], Any] = lambda x: x, depth: int = 0) -> Any:
    """A copy of a container and those in it, with `change` of everything else."""
    if not is_opened(value, depth):
        return change(value)
    if isinstance(value, tuple):
        return tuple(copied(v, change, depth + 1) for v in value)
    made = copy(value)
    fill(
        made,
        {k: copied(v, change, depth + 1) for k, v in value.items()}
        if isinstance(value, dict)
        else [copied(v, change, depth + 1) for v in value],
    )
    return made


def fill(container: Any, contents: Any) -> None:
    """Put something else into a container."""
    container.clear()
    getattr(container, "extend" if isinstance(container, list | deque) else "update")(contents)


def emptied_to(made: list[Tensor]) -> Callable[[Any], Any]:
    """Gives a tensor of zeros in place of one that was traced, and appends it to `made`."""

    def emptied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sizes = [int(n) for n in value.shape]
        made.append(torch.zeros(sizes, dtype=value.dtype, device=value.device))
        return made[-1]

    return emptied


def counted(old: Kept | None, new: Kept) -> bool:
    """Whether a number was counted up, perhaps from none."""
    before = 0 if old is None else old.value
    return type(before) is type(new.value) is int and new.value == before + 1


def write(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module, a class or a file."""
    if isinstance(owner, nn.Module):
        owner.__dict__[name] = value
    else:
        setattr(owner, name, value)


def restore(before: Mapping[Key, Kept], changed: Mapping[Key, Kept]) -> None:
    """Give changed attributes the value that they had, and containers what was in them."""
    for key, now in changed.items():
        old = before.get(key)
        if old is None:
            if key[1] in vars(now.owner):
                delattr(now.owner, key[1])
            continue
        opened = old.contents is not old.value and not isinstance(old.value, tuple)
        if type(old.value) in CONTAINERS and opened:
            fill(old.value, old.contents)
        write(old.owner, key[1], old.value)


def host_generators(model: nn.Module) -> dict[str, object]:
    """The states of the generators that Python code draws from: global ones, and the modules'."""
    found: dict[str, object] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy.random"] = legacy_state(numpy.random.get_state())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            label = ".".join(part for part in ("self", path, name) if part)
            if isinstance(value, random.Random):
                found[label] = value.getstate()
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                found[label] = repr(value.bit_generator.state)
            elif numpy is not None and isinstance(value, numpy.random.RandomState):
                found[label] = legacy_state(value.get_state())
    return found


def legacy_state(state: Any) -> object:
    """What tells the state of one of numpy's older generators apart."""
    _, keys, position, *_ = state
    return keys.tobytes(), position
