"""The program of one microbatch, captured with its samples, and how a batch is cut into them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from parloom.capture.build import capture
from parloom.capture.program import Loss
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.microbatch_counts import legal_microbatches
from parloom.ir.microbatches import of_microbatch
from parloom.ir.plan import MICROBATCH
from parloom.ir.samples import sample_dims


@dataclass(frozen=True, slots=True)
class Split:
    """A batch as `count` microbatches of neighboring samples; `dims` has the dim of samples of each
    input that is cut.
    """

    count: int = 1
    dims: tuple[tuple[str, int], ...] = ()

    def of(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The microbatches."""
        dims = dict(self.dims)
        for index in range(self.count):
            yield {n: self._part(t, dims.get(n), index) for n, t in batch.items()}

    def first(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The first microbatch."""
        return next(self.of(batch))

    def _part(self, tensor: Tensor, dim: int | None, index: int) -> Tensor:
        if dim is None:
            return tensor
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, index * size, size)


WHOLE = Split()


def split_of(graph: Graph, batch: Mapping[str, Tensor]) -> Split:
    """How `batch` is cut for `graph`, which may be the program of one microbatch."""
    counts = {
        batch[i.target].shape[i.samples] // i.value.spec.shape[i.samples]
        for i in graph.inputs
        if i.samples is not None
    }
    return Split(max(counts, default=1), tuple(graph.sample_dims.items()))


def capture_microbatch(
    model: nn.Module, batch: Mapping[str, Tensor], count: int, *, loss: Loss | None = None
) -> Graph:
    """The training program of one of `count` microbatches of `batch`; of all of it for one.

    Where samples lie is read off the program of the whole batch. Raises `InputError` where they do
    not divide.
    """
    graph = capture(model, batch, loss=loss)
    if count == 1:
        return graph
    factored = factorize(graph)
    legal_microbatches(factored, MICROBATCH).check(count)
    dims = sample_dims(factored)
    part = Split(count, tuple(dims.items())).first(batch)
    return of_microbatch(capture(model, part, loss=loss), dims, count)
