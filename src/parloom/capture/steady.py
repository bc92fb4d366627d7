"""Modules that do something else in the next call: a trace would repeat the first one for ever.

Forward may draw from generators on the host, or keep something for the next call: a count, a tensor
or a list in an attribute of a module or its class, or in a global of the file that it is from. Then
the model is traced again, with what it wrote put there. It may draw only if it seeds, which shows
in where the generators end; it may write only if the program is the same.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parloom.errors import CaptureError

PLAIN = (bool, int, float, str, type(None))
DICTS = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = (list, tuple, set, deque, *DICTS)  # of exactly these classes
LONGEST = 1000  # containers with more in them are tables, not notes for the next call
DEEPEST = 3
OWN = frozenset(vars(nn.Module()))  # parameters, hooks and the like
Key = tuple[str, str]  # how an error calls the owner, attribute


@dataclass(frozen=True, slots=True)
class Kept:
    """An attribute: who has it, its value, a copy of what is in that, and what tells it apart."""

    owner: Any
    value: Any
    contents: Any
    identity: object


class Watch:
    """What one call of a model's forward changes outside of its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: dict[Key, Kept] = {}
        self.changed: dict[Key, Kept] = {}
        self.drawn: frozenset[str] = frozenset()
        self.ends: dict[str, object] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the call: notes attributes that change, and generators with where they end."""
        self.before, generators = dict(attributes(self.model)), host_generators()
        try:
            yield
        except BaseException:
            restore(self.before, self.changes())
            raise
        self.ends = host_generators()
        self.drawn = frozenset(n for n, s in self.ends.items() if generators.get(n, s) != s)
        self.changed = self.changes()

    def changes(self) -> dict[Key, Kept]:
        """What is not as before; a tensor that was not there is taken for one that is made once."""
        now = dict(attributes(self.model))
        new = {k for k in now.keys() - self.before.keys() if not isinstance(now[k].value, Tensor)}
        old = {k for k in now.keys() & self.before.keys()
               if now[k].identity != self.before[k].identity}  # fmt: skip
        return {key: now[key] for key in new | old}

    def check(self, code: str, again: Callable[[], str]) -> None:
        """Raise `CaptureError` if `again`, which calls the model once more, is not `code`."""
        before, changed, drawn, ends = self.before, self.changed, self.drawn, self.ends
        if not changed and not drawn:
            return
        try:
            for (_, name), kept in changed.items():
                write(kept.owner, name, replayed(kept.contents))
            differs = again() != code
        finally:
            restore(before, changed)
        model = type(self.model).__name__
        free = sorted(n for n in drawn if self.ends[n] != ends[n])
        if free:
            raise CaptureError(
                f"cannot capture {model}: forward draws from {' and '.join(free)}, and every"
                " step of a plan would repeat what it drew while it was captured; draw in the data"
                " loader and give the result in the batch, draw with torch.rand, or switch it off"
                " (layer drop, masking)"
            )
        if differs and changed:
            owner, name = min(changed)
            inside = isinstance(changed[owner, name].owner, nn.Module)
            where = ".".join(part for part in (model, owner if inside else "") if part)
            what = f"self.{name}" if inside else f"{owner}.{name}"
            raise CaptureError(
                f"cannot capture {where}: forward changes {what} and then does something"
                " else in the next call; keep such state in a buffer (register_buffer, written in"
                " place) or decide outside of forward"
            )


def attributes(model: nn.Module) -> Iterator[tuple[Key, Kept]]:
    """Plain values, tensors and containers; neither parameters nor buffers."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and is_watched(value, Tensor):
                yield (path, name), kept(module, value)
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


def replayed(value: Any) -> Any:
    """A value that a traced call left, for the next call: tensors by shape."""
    return copied(value, emptied)


def emptied(value: Any) -> Any:
    """A tensor of zeros in place of one that was traced."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros([int(n) for n in value.shape], dtype=value.dtype, device=value.device)


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


def host_generators() -> dict[str, object]:
    """The states of the generators that Python code draws from."""
    found: dict[str, object] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, *_ = numpy.random.get_state()
        found["numpy.random"] = (keys.tobytes(), position)
    return found
