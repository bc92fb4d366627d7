"""Which key of a Hugging Face config is to blame: that with another value of which the model works.

The library checks few of its settings, and complains about the rest wherever they happen to be
used. Other values are the family's default, which is that of a key that is left out, and 1: what
does not divide is to be found from both of its sides.
"""

import json
import math
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parloom.errors import CaptureError, InputError, ParloomError
from parloom.input_files import MIB, read_input
from parloom.ir.json_text import line_and_column

MOST_BYTES = 16 * MIB
MOST_S = 15.0  # to look for the key to blame
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
    data = read_input(path, "the config", MOST_BYTES)
    try:
        text = data.decode("utf-8")
        values = json.loads(text)
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a Hugging Face config: no text in UTF-8") from None
    except json.JSONDecodeError as err:
        raise InputError(
            f"{path}:{err.lineno}:{err.colno}: not a Hugging Face config: not JSON: {err.msg}"
        ) from None
    except RecursionError:
        raise InputError(f"{path}: not a Hugging Face config: nested too deeply") from None
    except ValueError as err:  # a number of thousands of digits
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


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether a model works with other settings; nothing does after `end_s` of the monotonic clock.

    A config may have thousands of keys, and an attempt builds the model.
    """

    attempt: Attempt
    values: Mapping[str, Any]
    end_s: float = math.inf

    def works(
        self, left_out: Sequence[Key], other: Mapping[str, Any] = MappingProxyType({})
    ) -> bool:
        """Whether the attempt succeeds without some keys and with other values of some."""
        if time.monotonic() > self.end_s:
            return False
        tried = deepcopy({**self.values, **other})
        for *outer, name in left_out:
            owner = tried
            for part in outer:
                owner = owner[part]
            del owner[name]
        try:
            self.attempt(tried)
        except Exception:  # of the library, or of the model: which one does not matter
            return False
        return True

    def repairs(self, key: str) -> bool:
        """Whether another value of one key is enough."""
        return self.works(((key,),)) or (type(self.values[key]) is int and self.works((), {key: 1}))

    def inside(self, key: str) -> list[Key]:
        """The keys to blame of a part of the config; the part itself where it has none."""
        part = self.values[key]
        inner = [(key, name) for name in part] if isinstance(part, dict) else []
        return [path for path in inner if self.works((path,))] or [(key,)]

    def together(self) -> list[Key]:
        """As few keys as must be left out together; none where leaving out all is not enough.

        The last of the shortest list of first keys that is enough is one of them, and so on.
        """
        keys = _keys(self.values)
        candidates = [key for key in keys if key[0] not in KINDS]
        while not self.works(candidates):
            if len(candidates) == len(keys):
                return []
            candidates = keys[: len(candidates) + 1]
        found: list[Key] = []
        while not found or not self.works(found):
            if not candidates:
                return []  # the time is up
            fewest = bisect_left(
                range(1, len(candidates)),
                True,
                key=lambda n: self.works([*candidates[:n], *found]),
            )
            found.insert(0, candidates[fewest])
            candidates = candidates[:fewest]
        return found


def faults(values: Mapping[str, Any], attempt: Attempt) -> list[Key]:
    """Keys to blame for the failure of `attempt(values)`; none where it does not fail alike.

    The keys another value of each of which is enough; where there is none, several are bad: then
    as few as must be left out together. After `MOST_S`, those that are found by then.
    """
    if Trial(attempt, values).works(()):
        return []
    trial = Trial(attempt, values, time.monotonic() + MOST_S)
    joint = trial.together()
    alone = [key[0] for key in _keys(values) if joint == [key] or trial.repairs(key[0])]
    if not alone:
        return joint
    named = [key for key in alone if key not in KINDS] or alone
    return [inner for key in named for inner in trial.inside(key)]


def _keys(values: Mapping[str, Any]) -> list[Key]:
    """The keys of a config: first those that may make an attempt long, those in `KINDS` last."""
    return sorted(
        ((key,) for key in values), key=lambda key: (key[0] in KINDS, not COUNTED.search(key[0]))
    )


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
        alone = Trial(attempt, values).repairs(found[0][0])
        joint = len({key[0] for key in found}) == 1 or alone
        which = f"{'one' if joint else 'all'} of these keys"
    advice = f"the model works with another value of {which}"
    return InputError(f"{path}{position_of(text, found[0])}: {', '.join(shown)}: {said}; {advice}")


def _shown(values: Mapping[str, Any], key: Key) -> str:
    value: Any = values
    for part in key:
        value = value[part]
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:60]}..."
