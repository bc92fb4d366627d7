"""Models built anew in small sizes, or with fewer of their blocks: the copies that are proved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import lcm
from typing import Any

from torch import Tensor, nn

from parloom.capture import Loaded, capture, load_model
from parloom.errors import CaptureError
from parloom.execute.shrink_sizes import (
    LAYERS,
    ROLES,
    STAGE_LISTS,
    Attempt,
    atoms,
    need_of,
    small_batch,
    small_seq,
    small_sizes,
    whole,
)
from parloom.ir.plan import ModelSource

MAX_BLOCKS = 4  # per stack, where the blocks of a kind are decided differently


@dataclass(frozen=True)
class Needs:
    """What a small model must keep: divisors of sizes, blocks per stack, and microbatches, which
    may be `apart`, each computed by itself.
    """

    divisors: Mapping[int, int] = field(default_factory=dict)
    layers: int = 2
    num_microbatches: int = 1
    apart: bool = False

    def beside(self, other: "Needs") -> "Needs":
        """The needs of both."""
        sizes = {*self.divisors, *other.divisors}
        each = {n: lcm(self.divisors.get(n, 1), other.divisors.get(n, 1)) for n in sizes}
        return replace(self, divisors=each, layers=max(self.layers, other.layers))


def of_sizes(
    source: ModelSource, seed: int, loaded: Loaded, values: Mapping[str, Any], needs: Needs,
    attempt: Attempt,
) -> tuple[Loaded, tuple[str, ...], tuple[str, ...]]:  # fmt: skip
    """A config or a zoo model built with small settings, and what of sizes and of numbers of
    blocks changed.
    """
    groups = {"": values} | {
        key: value
        for key, value in values.items()
        if isinstance(value, dict) and "model_type" in value
    }
    batch, seq = _batch_and_seq(loaded)
    sizes = {batch, seq, seq - 1}.union(*(atoms(group) for group in groups.values())) - {0, 1}
    need = need_of(needs.divisors, sizes, broad=attempt.broad)
    small = small_seq(seq, need, attempt) if seq else 0
    layers = max(needs.layers, *(_kinds_listed(group) for group in groups.values()))
    changed: dict[str, Any] = {}
    for name, group in groups.items():
        found = small_sizes(group, layers, (seq, small), need, attempt)
        changed |= {name: found} if name and found else found
    fewer = small_batch(batch, need, needs.num_microbatches, needs.apart)
    made = load_model(
        source.spec,
        batch=fewer if batch else None,
        seq=small or None,
        dtype=source.dtype,
        seed=seed,
        sizes=changed,
    )
    told = [
        change
        for name, group in groups.items()
        for change in _changes(group, changed.get(name, {}) if name else changed)
    ]
    changes = [text for of_blocks, text in told if not of_blocks]
    changes += [f"batch {batch} -> {fewer}"] if fewer < batch else []
    changes += [f"seq {seq} -> {small}"] if small < seq else []
    return made, tuple(changes), tuple(text for of_blocks, text in told if of_blocks)


def _batch_and_seq(loaded: Loaded) -> tuple[int, int]:
    """Batch size and sequence length (0: no such) of a batch that parloom built."""
    shapes = {name: tuple(t.shape) for name, t in loaded.batch.items()}
    batch = next((s[0] for s in shapes.values() if s), 0)
    return batch, shapes["input_ids"][1] if "input_ids" in shapes else 0


def _changes(values: Mapping[str, Any], changed: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """`hidden_size 4096 -> 64`, and whether it is a number of blocks; not lists with an entry per
    block.
    """
    for key, small in changed.items():
        told = key in (*ROLES, *STAGE_LISTS, "depths") and small != values[key]
        if told and not isinstance(small, Mapping):
            yield ROLES.get(key) == LAYERS, f"{key} {values[key]} -> {small}"


def _kinds_listed(values: Mapping[str, Any]) -> int:
    """Blocks until every kind that a per-block list of a config names has come."""
    counts = {v for k, v in values.items() if ROLES.get(k) == LAYERS and whole(v)}
    needed = 2
    for value in values.values():
        if isinstance(value, list) and len(value) in counts and value:
            needed = max(needed, *(value.index(kind) + 1 for kind in value))
    return needed


def fewer_blocks(
    loaded: Loaded, stacks: Mapping[str, list[Any]], needs: Needs
) -> tuple[Loaded, tuple[str, ...], tuple[str, ...]]:
    """The model, in place, with fewer of each stack's blocks and on fewer samples, and what of
    samples and of blocks was dropped; the blocks stay where the model does not run without them.

    `stacks` has, by module path, a value per block; of each value a block stays. Blocks without one
    stay where there are no others.
    """
    batch, samples = _fewer_samples(loaded, needs)
    model = loaded.model
    removed: list[tuple[nn.Module, str, nn.Module]] = []
    told: list[str] = []
    for prefix, variants in stacks.items():
        try:
            stack = model.get_submodule(prefix)
        except AttributeError:
            continue
        kept = _kept(stack, variants)
        if kept is not None and len(kept) < len(stack):  # type: ignore[arg-type]
            parent, _, leaf = prefix.rpartition(".")
            removed.append((model.get_submodule(parent), leaf, stack))
            fewer = [stack[i] for i in kept]  # type: ignore[index]
            made = (
                nn.ModuleList(fewer) if isinstance(stack, nn.ModuleList) else nn.Sequential(*fewer)
            )
            setattr(model.get_submodule(parent), leaf, made)
            told.append(f"{len(kept)} of {len(variants)} {prefix}")
    try:
        if removed:
            capture(model, batch, loss=loaded.loss)
    except CaptureError:
        told.clear()
        for owner, leaf, stack in reversed(removed):
            setattr(owner, leaf, stack)
    return replace(loaded, batch=batch), samples, tuple(told)


def _kept(stack: nn.Module, variants: list[object]) -> list[int] | None:
    """Indices that stay of a list of blocks: of each run of equal modules at least two, and more
    where their decisions differ; None where the list is of another type.
    """
    if type(stack) not in (nn.ModuleList, nn.Sequential) or len(variants) != len(stack):  # type: ignore[arg-type]
        return None
    shapes = [
        (type(m), tuple((n, tuple(p.shape)) for n, p in m.named_parameters()))
        for m in stack.children()
    ]
    kept: list[int] = []
    for _, run in groupby(range(len(shapes)), key=lambda i: shapes[i]):
        indices = list(run)
        first = {variants[i]: i for i in reversed(indices) if variants[i] is not None}
        chosen = sorted(first.values())[:MAX_BLOCKS]
        spare = [i for i in indices if i not in chosen]
        spare.sort(key=lambda i: variants[i] is None)
        kept += sorted(chosen + spare[: max(0, 2 - len(chosen))])
    return kept


def _fewer_samples(loaded: Loaded, needs: Needs) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The first samples of a factory's batch, where all its tensors have the samples first."""
    sizes = {t.shape[0] if t.dim() else 0 for t in loaded.batch.values()}
    if len(sizes) != 1 or 0 in sizes:
        return loaded.batch, ()
    (size,) = sizes
    need = need_of(needs.divisors, {size}, broad=True)
    fewer = small_batch(size, need, needs.num_microbatches, needs.apart)
    if fewer >= size or size % fewer:
        return loaded.batch, ()
    return {n: t[:fewer] for n, t in loaded.batch.items()}, (f"batch {size} -> {fewer}",)
