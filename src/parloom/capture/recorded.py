"""Outputs of inner modules that a library's hooks put into lists: results of the call around them.

A model of transformers that returns what its routers or layers compute (`output_router_logits`)
has a forward hook on each of them. The hook appends to a list of the call of the model that is
active, by a key, and no walk of what the hook reaches shows that list. So a call of a module around
has, besides of its result, what it added to the lists.

The hook of no other code is taken for this one: it must be the code inside of the library's own
function, with the names that this file knows the meaning of.
"""

import sys
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

FILE = "transformers.utils.output_capturing"
COLLECTOR = "_active_collector"
INSTALL = "install_output_capuring_hook"
# All that the hook names: the lists, and for hidden states the number of those before.
NAMES = frozenset({COLLECTOR, "get", "keys", "len", "isinstance", "tuple", "append"})
FREE = frozenset({"key", "index", "capture_initial_hidden_state", "append_hidden_state"})
STATES = "hidden_states"  # the key whose first entry comes with the input of its module
Lists = Mapping[str, list[Any]]


def is_recorder(hook: object) -> bool:
    """Whether a hook only appends outputs to the lists."""
    install = vars(sys.modules[FILE]).get(INSTALL) if FILE in sys.modules else None
    if not isinstance(install, FunctionType) or not isinstance(hook, FunctionType):
        return False
    code = hook.__code__
    inner = any(code is c for c in install.__code__.co_consts if isinstance(c, CodeType))
    known = set(code.co_names) <= NAMES and set(code.co_freevars) <= FREE
    return inner and known and hook.__globals__ is install.__globals__


def is_collector(value: object) -> bool:
    """Whether an object knows the lists; code that has it may read how many calls there were."""
    collector = getattr(sys.modules.get(FILE), COLLECTOR, None)
    return value is not None and (
        value is collector or value is getattr(collector, "context_var", None)
    )


def active() -> Any:
    """The lists of the call that is active, by their keys; None where nothing is recorded."""
    collector = getattr(sys.modules.get(FILE), COLLECTOR, None)
    return None if collector is None else collector.get()


def lists() -> Lists:
    """The active lists as they are now."""
    found = active()
    return {k: list(v) for k, v in found.items()} if is_known(found) and found else {}


def is_known(found: object) -> bool:
    """Whether these are plain lists, none of which leaves entries out."""
    return found is None or (
        type(found) is dict
        and all(type(value) is list for value in found.values())
        and len({id(value) for value in found.values()}) == len(found)
    )


def state() -> object:
    """What hooks read of the lists; never equal where that cannot be told."""
    found = active()
    if not is_known(found):
        return object()
    return found and (*found, bool(found.get(STATES)))  # whether the first one is there


def added(before: Lists) -> Lists | None:
    """What was appended since; None where something else was done to the lists."""
    now = lists()
    if now.keys() != before.keys():
        return None
    kept = all(
        len(now[key]) >= len(old) and all(a is b for a, b in zip(old, now[key], strict=False))
        for key, old in before.items()
    )
    return {key: now[key][len(old) :] for key, old in before.items()} if kept else None


def add(more: Lists) -> None:
    """Append what a call would have."""
    found = active()
    for key, entries in more.items():
        found[key].extend(entries)
