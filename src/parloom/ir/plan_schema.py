"""The shape of a plan file: which keys there are, and of what type. Meaning is checked elsewhere.

Strict: nothing is coerced and an unknown key is an error, so a typing error cannot become a
default.
"""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from parloom.ir.expected import Objective, Status

LARGEST = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Index = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
# An action of the generated schedule is written for each.
MOST_MICROBATCHES = 2**16
Microbatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]
# Axis names reach generated code, so they are short identifiers; all other mentions of an axis are
# compared with the mesh's.
AxisName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=32)]

# Ranks of a cluster in ascending order: `0-3,8-11`.
Ranks = Annotated[str, Field(pattern=r"^[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*$")]

# A setting of torch (`torch.set_default_dtype`) and its value (`torch.float64`).
Setting = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$", max_length=100)]


def least_before_largest(ends: list[float]) -> list[float]:
    """The range as it is; raises `ValueError` where its ends are the wrong way round."""
    if ends[0] > ends[1]:
        raise ValueError(f"the least value, {ends[0]}, is above the largest, {ends[1]}")
    return ends


# The least and largest value of an input.
End = (
    Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
    | Annotated[float, Field(allow_inf_nan=False)]
)
Range = Annotated[
    list[End], Field(min_length=2, max_length=2), AfterValidator(least_before_largest)
]


class Document(BaseModel):
    """Base of every object in a plan file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PrimeDocument(Document):
    """One prime factor of a mesh axis; a cluster of one device has one of size 1."""

    size: Annotated[int, Field(ge=1, le=2**31)]
    stride: Count
    level: Index


class AxisDocument(Document):
    """A mesh axis over ranks; the one in time follows from `num_microbatches`."""

    axis: AxisName
    primes: Annotated[list[PrimeDocument], Field(min_length=1)]


class StorageDocument(Document):
    """How a stored tensor is chunked beyond its compute layout."""

    axes: list[Name] = []
    dim: Index = 0
    memory: Literal["device", "host"] = "device"


class ParameterDocument(Document):
    """Storage of a weight, its gradient and its optimizer state, and in which data types weights
    that are gathered in each pass and gradients travel, where that is not their own.
    """

    weight: StorageDocument = StorageDocument()
    gradient: StorageDocument = StorageDocument()
    optimizer: StorageDocument = StorageDocument()
    weight_sent: Literal["", "int8"] = ""
    gradient_sent: Literal["", "int8"] = ""


class StageDocument(Document):
    """Items of main's body (none: all), the ranks of the devices that compute them, their mesh, and
    the microbatches that they run (none: all), so many at once. `order`: on which of its devices
    each rank of the mesh is, where that is not as they are numbered.
    """

    items: list[Name]
    devices: Ranks
    mesh: list[AxisDocument]
    order: list[Index] | None = None
    microbatches: Ranks | None = None
    at_once: Microbatches = 1


class RecomputedDocument(Document):
    """What of a block is recomputed: operators, and operators or inputs of which only the
    redistributions are.
    """

    values: list[Name] = []
    moves: list[Name] = []


LISTS, POLICY = "lists", "policy"
# A policy for the whole block, or lists; an error's path has LISTS or POLICY behind the block.
Activation = Annotated[
    Annotated[RecomputedDocument, Tag(LISTS)]
    | Annotated[Literal["keep", "recompute", "offload"], Tag(POLICY)],
    Discriminator(lambda found: LISTS if isinstance(found, dict) else POLICY),
]


class DecisionsDocument(Document):
    """Everything that the search chose, keyed by the user's names."""

    num_microbatches: Microbatches
    schedule: Name
    # One list for each group of devices that have the same stages: `F0 B0 REDUCE STEP GATHER`.
    actions: list[Name] = []
    batch_semantics: Literal["global", "microbatch"]
    batch_norm: Literal["global", "local"]
    master_dtype: str | None
    reduce_dtype: str | None
    rewrites: list[Name]
    stages: Annotated[list[StageDocument], Field(min_length=1)]
    nodes: dict[Name, dict[Name, list[Name]]]
    parameters: dict[Name, ParameterDocument]
    activations: dict[str, Activation]


class SourceDocument(Document):
    """Where the model came from."""

    spec: Name
    batch: Count | None
    seq: Count | None
    dtype: Name | None


class OptimizerDocument(Document):
    """The optimizer's class and how many states it keeps."""

    name: Name
    num_states: Index


class PredictionDocument(Document):
    """What one step was expected to cost."""

    step_s: Number
    peak_bytes: Index
    memory: dict[Name, Index]
    source: Literal["spec", "calibrated", "measured"]
    error: Number = 0.0
    cores: Count | None = None
    peaks: dict[Name, Index] = {}
    waits_s: list[Number] = []


class AlternativeDocument(Document):
    """Another candidate."""

    name: Name
    step_s: Number
    peak_bytes: Index
    fits: bool


class ConstraintDocument(Document):
    """A flag that the plan keeps to, and the best without it; `instead` of what is forbidden."""

    text: str
    step_s: Number | None
    peak_bytes: Index | None
    instead: str = ""


class AimDocument(Document):
    """What a plan was chosen by, where that is not its time."""

    objective: Annotated[Objective, Field(strict=False)]
    value: Number
    bound: Number | None


class InferenceDocument(Document):
    """What a plan of forward passes serves."""

    new_tokens: Index
    cache_bytes: Index
    steps: Count
    weights: Literal["int8", "fp8"] | None
    period_s: Number | None = None
    prefill: PredictionDocument | None
    prefill_nodes: dict[Name, dict[Name, list[Name]]]
    prefill_sha256: str
    prefill_graph: list[str]


class PlanDocument(Document):
    """A whole plan file."""

    format: Literal["parloom.plan"]
    version: str
    method: Name
    source: SourceDocument
    cluster: Name
    optimizer: OptimizerDocument
    seed: Seed
    fingerprint: str
    prediction: PredictionDocument | None
    bound_s: Number | None
    solver_gap: Number | None
    aim: AimDocument | None = None
    inference: InferenceDocument | None = None
    status: Annotated[Status, Field(strict=False)] = Status.COMPLETE
    alternatives: list[AlternativeDocument]
    constraints: list[ConstraintDocument] = []
    assumptions: list[str]
    notes: list[str]
    settings: dict[Setting, Setting] = {}
    ranges: dict[Name, Range] = {}
    decisions: DecisionsDocument
    graphs_sha256: str
    graph: list[str]
    evaluation_graph: list[str]


def known_keys(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that the object at `path` may have."""
    kind: Any = PlanDocument
    for part in path:
        kind = _bare(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(part)].annotation
        else:
            kind = get_args(kind)[-1]
    kind = _bare(kind)
    fields = isinstance(kind, type) and issubclass(kind, BaseModel)
    return tuple(kind.model_fields) if fields else ()


def _bare(kind: Any) -> Any:
    """A type without its constraints and without `None`."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    return kind
