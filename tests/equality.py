"""A lowered program on threads of one process against a reference, in float64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from parloom import runtime as rt
from parloom.execute.program import compile_pcg
from parloom.execute.verify import SEED
from parloom.ir.pcg import PCG

TOLERANCE = 1e-9
FLOOR = 1e-2  # of the largest gradient
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What is compared: the loss, gradients by parameter, outputs, and buffers after the step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of the outcome: the elements `where` of it, as one rank has them."""

    kind: str
    name: str
    where: tuple[slice, ...]
    value: Tensor


def parallel(pcg: PCG, tensors: Tensors, batch: Tensors) -> list[list[Piece]]:
    """One training step on every rank, without moving the weights: what each rank then has."""
    program = compile_pcg(pcg, "test").program

    def rank(comm: rt.Comm) -> list[Piece]:
        outputs: list[Piece] = []

        def forward(
            ctx: rt.Context, given: dict[str, Tensor], hoisted: tuple[Tensor, ...]
        ) -> rt.Result:
            result = program.forward(ctx, given, hoisted)
            for spec in program.outputs:
                boxes = rt.boxes(spec.dims, comm.mesh, ctx.coordinates)
                value = result.outputs[spec.name]
                assert value.dtype == getattr(torch, spec.dtype)
                outputs.extend(_pieces("outputs", spec.name, boxes, value))
            return result

        trainer = rt.Trainer(
            replace(program, forward=forward),
            tensors,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
            comm=comm,
            seed=SEED,
            exact_random=True,
        )
        found = [Piece("loss", "", (), trainer.step(batch).loss), *outputs]
        for name, held in trainer.parts[0].store.helds.items():
            if held.spec.trainable:
                grad = held.owned.grad
                mine = torch.zeros_like(held.owned) if grad is None else grad
                found += _pieces("gradients", name, held.boxes(comm), mine)
        for name, value in trainer.parts[0].store.buffers.items():
            found.append(Piece("buffers", name, (), value))
        return found

    return rt.run_threads(program.mesh, rank)


def _pieces(kind: str, name: str, boxes: tuple[rt.Box, ...], value: Tensor) -> list[Piece]:
    value = value.detach()
    return [
        Piece(
            kind,
            name,
            tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)),
            value[box.local],
        )
        for box in boxes
    ]


def difference(expected: Outcome, found: list[list[Piece]]) -> tuple[float, str]:
    """The largest relative difference over all ranks' pieces, and where it is.

    A tensor's scale is its largest element; that of a gradient is at least a hundredth of the
    largest of all gradients. Whatever is expected must be found on some rank.
    """
    largest = max((size(g) for g in expected.gradients.values()), default=0.0)
    wanted = {("loss", ""): expected.loss} | {
        (kind, name): tensor
        for kind in ("gradients", "outputs", "buffers")
        for name, tensor in getattr(expected, kind).items()
        if tensor.numel()
    }
    scales = {
        key: max(size(tensor), FLOOR * largest if key[0] == "gradients" else 0.0, 1e-30)
        for key, tensor in wanted.items()
    }
    there = {(p.kind, p.name) for pieces in found for p in pieces if p.value.numel()}
    if there != wanted.keys():
        return float("inf"), f"expected {sorted(wanted)}, found {sorted(there)}"
    worst, where = 0.0, "nothing"
    for rank, pieces in enumerate(found):
        for piece in pieces:
            key = piece.kind, piece.name
            if not piece.value.numel():
                continue
            error = gap(wanted[key][piece.where], piece.value) / scales[key]
            if not error <= worst:
                worst, where = error, f"{piece.kind} {piece.name} on rank {rank}"
    return worst, where


def gap(expected: Tensor, found: Tensor) -> float:
    """Largest difference; inf where shape or dtype differ, or where not both are finite."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    same = (expected == found) | (expected.isnan() & found.isnan())
    if bool(same.all()):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    largest = float((expected[~same] - found[~same]).abs().max())
    return float("inf") if math.isnan(largest) else largest


def size(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    finite = tensor[tensor.isfinite()].double()
    return float(finite.abs().max()) if finite.numel() else 0.0
