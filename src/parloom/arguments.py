"""What `plan` may be asked for, checked alike for the command's flags and for keyword arguments."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from parloom.candidates import ALGEBRA, COMPARATORS, RANDOM
from parloom.comparators.baselines import RULES
from parloom.cost import units
from parloom.errors import InputError, nearest
from parloom.ir.expected import OF_INFERENCE, Objective
from parloom.ir.mesh import Cluster
from parloom.ir.plan import BATCH_SEMANTICS, DTYPES, GLOBAL
from parloom.ir.regular_parts import check_on_any
from parloom.quantization import QUANTIZED
from parloom.search.conflicts import check_axes
from parloom.search.pinned import Pinned, Subjects
from parloom.search.pins import Pin, parse_pin
from parloom.search.request import AUTO

METHODS = (AUTO, *RULES, RANDOM, *COMPARATORS, *ALGEBRA)
# Methods that count work; the others do what they do.
COUNTED = (AUTO, RANDOM, "alpa", "alpa_intra", "flexflow", "unity", *ALGEBRA)
LARGEST = 2**63 - 1
# The least that each may be.
COUNTS = MappingProxyType(
    {"batch": 1, "seq": 1, "microbatches": 1, "devices": 1, "seed": 0, "budget": 1}
)


def check(model: object, asked: Mapping[str, object]) -> None:
    """Raise `InputError` for a model that is no spec, or the first bad value of `asked`.

    Values are looked at by the names of `parloom.plan`'s arguments; None is one left out.
    """
    if not isinstance(model, str):
        raise InputError(
            f"the model is a {type(model).__name__}; give text that says how to build it, so that"
            " every rank can: zoo:NAME, a Hugging Face config.json, folder or Hub id, or a function"
            " that returns (model, batch), as 'file.py:factory' or 'pkg.module:factory'"
        )
    for name, least in COUNTS.items():
        given = asked.get(name)
        if given is None:
            continue
        if isinstance(given, int) and given > LARGEST:
            raise InputError(f"{name}: must be at most {LARGEST}, got {given}")
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise InputError(f"{name}: must be a whole number from {least} on, got {given!r}")
    if asked.get("batch_semantics", GLOBAL) not in BATCH_SEMANTICS:
        given = str(asked["batch_semantics"])
        raise InputError(
            f"batch_semantics: no semantics {given!r}{nearest(given, BATCH_SEMANTICS)}"
        )
    objective = asked.get("objective", Objective.TIME)
    if objective not in list(Objective):
        raise InputError(f"objective: none is {objective!r}{nearest(str(objective), Objective)}")
    names = ("new_tokens", "steps", "weights")
    given = {f"--{name.replace('_', '-')}": asked.get(name) for name in names}
    given[f"--objective {objective}"] = objective in OF_INFERENCE
    if not asked.get("inference") and any(given.values()):
        flag = next(flag for flag, value in given.items() if value)
        raise InputError(f"{flag} goes with --inference")
    dtype, method = asked.get("dtype"), asked.get("method", "auto")
    if dtype is not None and dtype not in (*DTYPES, *DTYPES.values()):
        raise InputError(f"dtype: no dtype {dtype!r}{nearest(str(dtype), DTYPES)}")
    if method not in METHODS and not Path(str(method)).exists():
        raise InputError(
            f"method: no method or plan file {method!r}{nearest(str(method), METHODS)}"
        )
    memory_bytes(asked.get("memory"))
    _check_search(asked)


def _check_search(asked: Mapping[str, object]) -> None:
    """Pins that can be read, and limits that mean something."""
    for flag in ("pin", "forbid"):
        given = asked.get(flag) or ()
        if not isinstance(given, list | tuple):
            raise InputError(f"{flag}: must be a list of NAME=LAYOUT, got {given!r}")
        for text in given:
            parse_pin(str(text), forbidden=flag == "forbid")
    allowed = asked.get("allow") or ()
    for name in allowed if isinstance(allowed, list | tuple) else (allowed,):
        if name != QUANTIZED:
            raise InputError(f"allow: nothing is called {name!r}; known: {QUANTIZED}")
    if asked.get("budget") is not None and asked.get("method", AUTO) not in COUNTED:
        raise InputError(f"budget: only {', '.join(COUNTED)} count work (--method)")
    gap = asked.get("require_gap")
    if gap is None:
        return
    if not isinstance(gap, int | float) or isinstance(gap, bool) or not 0 <= gap < math.inf:
        raise InputError(f"require_gap: must be a number from 0 on, as 0.05, got {gap!r}")
    if asked.get("method", AUTO) != AUTO:
        raise InputError("require_gap: only --method auto proves a bound")


def check_on(cluster: Cluster, asked: Mapping[str, object]) -> None:
    """Raise `InputError` for a pin on meshes or axes that no plan on `cluster` has, whatever the
    model: a capture may take minutes.
    """
    if asked.get("method", AUTO) != AUTO or asked.get("microbatches") not in (None, 1):
        return  # other methods have meshes of their own
    pins: list[Pin] = []
    for flag in ("pin", "forbid"):
        given = asked.get(flag)
        texts = given if isinstance(given, list | tuple) else ()
        pins += (parse_pin(str(text), forbidden=flag == "forbid") for text in texts)
    pinned = Pinned(tuple(map(Subjects, pins)))
    check_on_any(cluster, lambda part: check_axes(pinned, part))


def memory_bytes(given: object) -> int | None:
    """Bytes of memory given as a number of them or as text (`70GB`); None stays None."""
    if given is None:
        return None
    try:
        size = units.parse_bytes(given, down=True) if isinstance(given, str) else given
    except InputError as error:
        raise InputError(f"memory: {error}") from None
    if not isinstance(size, int) or isinstance(size, bool):
        raise InputError(f"memory: must be bytes or text such as 70GB, got {given!r}")
    if size <= 0:
        raise InputError(f"memory: must be greater than zero, got {given!r}")
    return size


def clusters_of(text: str) -> list[str]:
    """The clusters of `A,B,C`; a file's content, in braces, is one."""
    if text.startswith("{"):
        return [text]
    found = [spec.strip() for spec in text.split(",")]
    if not all(found):
        raise InputError(f"--cluster {text}: write clusters with commas between them: 4xA,8xB")
    return list(dict.fromkeys(found))
