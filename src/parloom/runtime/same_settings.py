"""Whether ranks train with the same settings: options, schedule, clipping, seed, progress."""

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parloom.errors import InputError
from parloom.runtime.comm import Comm
from parloom.runtime.optimizer import IMPLEMENTATION
from parloom.runtime.same import told_by_all

# A metric may differ in its last bits; where it matters, learning rates differ, too.
MEASURED = ("best",)
ABSENT = "left out"


def due(done: int) -> bool:
    """Whether settings are compared after `done` steps: 0, 1, 2, 4, 8, ..."""
    return done & (done - 1) == 0


def settings_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, str]:
    """The options of the parameters of `names`, by what an error calls them."""
    found = {}
    for group in optimizer.param_groups:
        options = {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names", *IMPLEMENTATION)
        }
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                continue
            found.update({f"{key} of {name}": _text(value) for key, value in options.items()})
    return found


def settings_in(prefix: str, state: Mapping[str, Any]) -> dict[str, str]:
    """The entries of a state dict, by what an error calls them."""
    return {f"{prefix}{key}": _text(v) for key, v in state.items() if key not in MEASURED}


def check_same_settings(comm: Comm, mine: Mapping[str, str], device: torch.device) -> None:
    """Raise `InputError` that names the first of `mine` that two ranks have differently.

    Collective: eight bytes from each rank, and all settings where those differ.
    """
    group = comm.group(comm.mesh.space)
    if group.size == 1:
        return
    text = json.dumps(mine, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()[:8]
    sent = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    everyone = sent.new_empty(group.size, 1)
    group.all_gather(everyone, sent).wait()
    if len(set(everyone.flatten().tolist())) == 1:
        return
    ranks = [json.loads(told) for told in told_by_all(comm, text, device)]
    for rank, (left, right) in enumerate(pairwise(ranks), 1):
        for name in (*left, *right):
            a, b = left.get(name, ABSENT), right.get(name, ABSENT)
            if a != b:
                raise InputError(
                    f"{name} differs between ranks {rank - 1} and {rank}: {a} and {b}; give every"
                    " rank the same optimizer, scheduler, clip_norm, seed and checkpoint: do not"
                    " derive them from the rank, its samples or unseeded random numbers"
                )


def _text(value: Any) -> str:
    """A value as all ranks print it: no addresses of objects."""
    if isinstance(value, Tensor):
        return repr(value.detach().tolist())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__
