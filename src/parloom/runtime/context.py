"""What a generated function is given besides its tensors: where and when it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parloom.runtime.comm import Comm, Group, TimeGroup
from parloom.runtime.mesh import Mesh
from parloom.runtime.remake import Again, Parts


class Weights(Protocol):
    """Where compute-layout weights and buffers come from (`runtime.store`)."""

    def weight(self, name: str) -> Tensor: ...

    def buffer(self, name: str) -> Tensor: ...

    def call(
        self,
        ctx: "Context",
        function: Callable[..., Any],
        prefix: str,
        inputs: tuple[Tensor, ...],
        weights: tuple[str, ...],
        recompute: bool,
        again: Again | None,
    ) -> Any: ...


@dataclass(slots=True)
class Context:
    """One rank's place in the mesh, the moment in training, and its weights.

    `exact_random` draws random masks for the global tensor and slices them, so that every layout
    sees the same ones; otherwise each shard draws its own. `own_draws`: so does each microbatch,
    whatever it draws; with `exact_random` its part, in its first dim, of what all draw together.
    `watch` is told what comes next, `parts` which part of a block that drops values is run.
    """

    comm: Comm
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    exact_random: bool = False
    own_draws: bool = False
    store: Weights | None = None
    cached_indices: dict[object, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    watch: Callable[[str], None] = lambda text: None
    parts: Parts | None = None

    @property
    def mesh(self) -> Mesh:
        return self.comm.mesh

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate along every axis, the axis in time included."""
        return self.comm.mesh.coordinates(self.comm.rank, self.microbatch)

    def group(self, axes: tuple[str, ...]) -> Group:
        """The ranks that differ from this one along `axes` only; in time, the microbatches."""
        time = self.mesh.time
        if time is not None and axes == (time,):
            return TimeGroup(self.mesh[time].size, self.microbatch)
        return self.comm.group(axes)

    def weight(self, name: str) -> Tensor:
        """The parameter `name` in its compute layout."""
        return self._weights().weight(name)

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` in its compute layout."""
        return self._weights().buffer(name)

    def constant(self, key: str, data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """`data` (nested tuples) as a tensor of `shape`, made once: a copy would wait for a GPU."""
        made = self.constants.get(key)
        if made is None:
            made = torch.tensor(data, dtype=dtype, device=self.device).reshape(shape)
            if not torch.compiler.is_compiling():
                self.constants[key] = made
        return made

    def call(
        self,
        function: Callable[..., Any],
        prefix: str,
        inputs: tuple[Tensor, ...],
        weights: tuple[str, ...],
        recompute: bool = False,
        again: Again | None = None,
    ) -> Any:
        """`function(ctx, prefix, *inputs, *weights)` with its weights gathered for the call.

        With `recompute` its activations are dropped and computed again in the backward pass; where
        `again` is given the function returns a `Made`, of which only the dropped values are.
        """
        return self._weights().call(self, function, prefix, inputs, weights, recompute, again)

    def again(self, part: int) -> AbstractContextManager[None]:
        """Within this context runs a part of a block that its backward pass makes again."""
        return nullcontext() if self.parts is None else self.parts.run(part)

    def _weights(self) -> Weights:
        if self.store is None:
            raise LookupError("this context has no parameter store")
        return self.store
