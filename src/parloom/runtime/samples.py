"""A rank's own samples: the axes over which they differ, and what is cut from a local batch.

A local batch is the global one at this rank's coordinates of some axes, in its order. So each of
them must cut the samples of all inputs at the same places; by all other axes the rank cuts itself.
"""

from collections.abc import Mapping
from fractions import Fraction

from parloom.runtime.mesh import Mesh
from parloom.runtime.program import Pipeline, Program, TensorSpec
from parloom.runtime.sharding import Dims

SampleDims = Mapping[str, int]  # the dim of samples by input; none for what all samples share


def first_dims(program: Program | Pipeline) -> SampleDims:
    """Dim 0 of every input that is as long there as the first."""
    shaped = [spec for spec in program.inputs if spec.shape]
    return {spec.name: 0 for spec in shaped if spec.shape[0] == shaped[0].shape[0]}


def sample_axes(program: Program, dims: SampleDims) -> tuple[str, ...]:
    """The axes over ranks that cut the samples of all inputs alike, outermost first."""
    found = [_places(spec, dims[spec.name], program.mesh) for spec in program.inputs
             if spec.name in dims]  # fmt: skip
    if not found:
        return ()
    return tuple(
        axis for axis, place in found[0].items() if all(p.get(axis) == place for p in found)
    )


def local_axes(pipeline: Pipeline, dims: SampleDims) -> tuple[tuple[str, ...], ...]:
    """By stage, the axes over which its ranks are given other samples: those of `sample_axes`.

    None in any stage, where stages that read samples cut them in other ways, or where a rank has
    another place in each of its stages.
    """
    axes = tuple(sample_axes(program, dims) for program in pipeline.programs)
    cuts, places = set(), dict[int, int]()
    for program, own, ranks in zip(pipeline.programs, axes, pipeline.ranks, strict=True):
        sampled = [spec for spec in program.inputs if spec.name in dims]
        if not sampled:
            continue
        shares = _places(sampled[0], dims[sampled[0].name], program.mesh)
        cuts.add(tuple((program.mesh[axis].size, shares[axis]) for axis in own))
        for index, rank in enumerate(ranks):
            if places.setdefault(rank, place := position(program.mesh, index, own)) != place:
                return ((),) * len(axes)
    return axes if len(cuts) <= 1 else ((),) * len(axes)


def position(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """The place of a rank along axes, the first of which is outermost."""
    found, coordinates = 0, mesh.coordinates(rank)
    for axis in axes:
        found = found * mesh[axis].size + coordinates[axis]
    return found


def _places(spec: TensorSpec, dim: int, mesh: Mesh) -> dict[str, Fraction]:
    """How far apart, as a share of all, samples of neighboring coordinates are."""
    places: dict[str, Fraction] = {}
    share = Fraction(1)
    for digit in spec.dims[dim]:
        size = digit if isinstance(digit, int) else mesh[digit].size
        share /= size
        if isinstance(digit, str) and digit in mesh.space:
            places[digit] = share
    return places


def local_dims(spec: TensorSpec, dims: SampleDims, axes: tuple[str, ...]) -> Dims:
    """The digits of an input of a local batch, without those of the rank's own samples."""
    own = dims.get(spec.name)
    return tuple(
        tuple(d for d in digits if d not in axes) if dim == own else digits
        for dim, digits in enumerate(spec.dims)
    )


def num_samples(program: Program | Pipeline, dims: SampleDims) -> int:
    """The samples of a global batch: of inputs with several rows for each, those with fewest."""
    sizes = [spec.shape[dims[spec.name]] for spec in program.inputs if spec.name in dims]
    return min(sizes, default=0)
