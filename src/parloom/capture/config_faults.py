"""Which key of a Hugging Face config is to blame: that with another value of which the model works.

The library checks few of its settings, and complains about the rest wherever they happen to be
used. Other values are the family's default, which is that of a key that is left out, and 1: what
does not divide is to be found from both of its sides.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from parloom.errors import CaptureError, InputError, ParloomError
from parloom.ir.json_text import line_and_column

MOST_BYTES = 16 << 20  # of a config file
# Numbers of things that the library makes one by one.
COUNTED = re.compile(r"layers?$|depths?$|blocks?$|stages?$|num_labels|experts")
MOST_COUNTED = 100_000
PROBABILITY = re.compile(r"drop(out|_rate|_path_rate)?(_p|_prob)?$|layerdrop$")
# Exceptions whose names add nothing to what they say.
UNNAMED = re.compile(r"(Value|Runtime|OS)Error|StrictDataclass")
FIELD = re.compile(r"[Ff]ield '(\w+)'")  # as the library names a value that it does check
# A key that says which model it is, and not how: blamed where no other is.
KINDS = ("architectures", "model_type")
Key = tuple[str, ...]
Attempt = Callable[[dict[str, Any]], object]


def read_values(path: Path) -> tuple[dict[str, Any], str]:
    """The settings in a file and its text.

    Raises: InputError with the position of what is no JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as err:
        raise InputError(f"cannot read the config {path}: {reason_of(err)}") from None
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: more than {MOST_BYTES >> 20} MiB, which no config has")
    try:
        text = data.decode("utf-8")
        values = json.loads(text)
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a Hugging Face config: no text in UTF-8") from None
    except json.JSONDecodeError as err:
        raise InputError(
            f"{path}:{err.lineno}:{err.colno}: not a Hugging Face config: not JSON: {err.msg}"
        ) from None
    except (ValueError, RecursionError) as err:
        raise InputError(f"{path}: not a Hugging Face config: {reason_of(err)}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}:1:1: not a Hugging Face config: expected an object in braces")
    if not isinstance(values.get("model_type", ""), str):
        place = position_of(text, ("model_type",))
        shown = f"model_type must be text, got {_shown(values, ('model_type',))}"
        raise InputError(f"{path}{place}: not a Hugging Face config: {shown}")
    return values, text


def check_values(values: Mapping[str, Any], path: Path, text: str, at: Key = ()) -> None:
    """Raise `InputError` for a number of layers, labels or the like that no model has, of which the
    library would make a list first of all, and for what is no probability, which a trace takes.
    """
    for name, value in values.items():
        key = (*at, name)
        why = ""
        if isinstance(value, dict):
            check_values(value, path, text, key)
        elif isinstance(value, int | float):
            if COUNTED.search(name) and value > MOST_COUNTED:
                why = f"at most {MOST_COUNTED} can be built here"
            elif PROBABILITY.search(name) and not 0 <= value <= 1:
                why = "a probability is from 0 to 1"
        if why:
            place = position_of(text, key)
            raise InputError(f"{path}{place}: {'.'.join(key)} is {value!r:.60}, and {why}")


def position_of(text: str, key: Key) -> str:
    """`:LINE:COLUMN` of a key."""
    place = line_and_column(text, key, at_key=True)
    return f":{place[0]}:{place[1]}" if place else ""


def reason_of(err: BaseException) -> str:
    """What an exception says, on one line."""
    if isinstance(err, OSError) and err.strerror:
        return err.strerror
    said = " ".join(str(err).partition("Exception raised from")[0].split())
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
    if not shown or not (UNNAMED.match(type(err).__name__) or isinstance(err, ParloomError)):
        shown = f"{type(err).__name__}: {shown}" if shown else type(err).__name__
    return shown if len(shown) <= 400 else f"{shown[:400]}..."


def faults(values: Mapping[str, Any], attempt: Attempt) -> list[Key]:
    """Keys to blame for the failure of `attempt(values)`; none where it does not fail alike.

    First the keys another value of each of which is enough. Where there is none, several are bad:
    then as few as must be left out together.
    """
    if works(attempt, values, ()):
        return []
    keys = [*(k for k in values if k not in KINDS), *(k for k in KINDS if k in values)]
    alone = [k for k in keys if _repairs(attempt, values, k)]
    if alone:
        named = [k for k in alone if k not in KINDS] or alone
        return [inner for key in named for inner in _inside(values, key, attempt)]
    left_out: list[Key] = []
    for key in keys:
        left_out.append((key,))
        if works(attempt, values, left_out):
            break
    else:
        return []
    for candidate in tuple(left_out):
        rest = [key for key in left_out if key != candidate]
        if works(attempt, values, rest):
            left_out = rest
    return left_out


def _repairs(attempt: Attempt, values: Mapping[str, Any], key: str) -> bool:
    """Whether the attempt succeeds with another value of one key."""
    if works(attempt, values, ((key,),)):
        return True
    return type(values[key]) is int and works(attempt, {**values, key: 1}, ())


def _inside(values: Mapping[str, Any], key: str, attempt: Attempt) -> list[Key]:
    """The keys to blame of a part of the config; the part itself where it has none."""
    part = values[key]
    inner = [(key, name) for name in part] if isinstance(part, dict) else []
    return [path for path in inner if works(attempt, values, (path,))] or [(key,)]


def works(attempt: Attempt, values: Mapping[str, Any], left_out: Sequence[Key]) -> bool:
    """Whether the attempt succeeds without some keys."""
    tried = deepcopy(dict(values))
    for *outer, name in left_out:
        owner = tried
        for part in outer:
            owner = owner[part]
        del owner[name]
    try:
        attempt(tried)
    except Exception:  # of the library, or of the model: which one does not matter
        return False
    return True


def blamed(
    path: Path, values: Mapping[str, Any], text: str, attempt: Attempt, err: ParloomError
) -> ParloomError:
    """The error with file, position, key and value; with the file alone where no key is to blame.

    A `CaptureError` for which no key is to blame is one of the model's own code, and stays.
    """
    said = str(err).removeprefix(f"{path}: ")
    field = FIELD.search(said)
    if field and field[1] in values:
        return InputError(f"{path}{position_of(text, (field[1],))}: {said}")
    found = faults(values, attempt)
    if not found:
        return err if isinstance(err, CaptureError) else InputError(f"{path}: {said}")
    shown = [f"{'.'.join(key)} is {_shown(values, key)}" for key in found[:3]]
    which = "this key"
    if len(found) > 1:
        joint = len({key[0] for key in found}) == 1 or _repairs(attempt, values, found[0][0])
        which = f"{'one' if joint else 'all'} of these keys"
    advice = f"the model works with another value of {which}"
    return InputError(f"{path}{position_of(text, found[0])}: {', '.join(shown)}: {said}; {advice}")


def _shown(values: Mapping[str, Any], key: Key) -> str:
    value: Any = values
    for part in key:
        value = value[part]
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}..."
