"""What identifies a model and batch: a plan is valid for equal fingerprints only."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from parloom.capture.translate import dtype_name


def fingerprint(model: nn.Module, batch: Mapping[str, Tensor], loss: object = None) -> str:
    """16 hex digits of a SHA-256 over parameters, buffers, batch and module sources.

    Parameters and buffers count by name, shape, dtype and requires_grad, not by value; sources are
    those of all module classes but torch's own, and of the loss function where there is one.
    """
    parts = [
        [
            ["parameter", *described(n, p)]
            for n, p in model.named_parameters(remove_duplicate=False)
        ],
        [["buffer", *described(n, b)] for n, b in model.named_buffers(remove_duplicate=False)],
        [["batch", *described(n, t)] for n, t in sorted(batch.items())],
        sorted(set(sources(model))),
    ]
    if loss is not None:
        parts.append([source_text(loss)])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def described(name: str, tensor: Tensor) -> list[object]:
    """What of a tensor a plan depends on."""
    return [name, list(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad]


def sources(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(class name, source text) of the model's module classes; no text where there is none."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.startswith("torch.nn."):
            continue
        yield f"{kind.__qualname__}", source_text(kind)


def source_text(thing: Any) -> str:
    """Source of a class or function; empty where it was defined interactively or generated."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""
