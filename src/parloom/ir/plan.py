"""The plan: decisions only; everything else is derived by `lower`.

Decisions are keyed by the user's names: `transformer.h.0.attn:addmm#0` for an operator, the
state-dict name for a parameter, the module path of a block call for its activations. A key that is
missing has the default: replicated compute, storage equal to the compute layout, activations kept.

Maps are tuples sorted by key (numbers inside a key count as numbers), so that equal decisions are
equal values and equal files.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from parloom.errors import NotYetError, VerifyError
from parloom.ir.expected import Aim, Alternative, Constraint, Objective, Prediction, Status
from parloom.ir.mesh import Mesh
from parloom.ir.shown import Shown, asked

T = TypeVar("T")

FORMAT = "parloom.plan"
VERSION = "2.0"

# What the source of a model that the caller held begins with, in the place of what builds it.
LIVE = "live:"
# The flags that ask for so many devices of a cluster, and for so much memory of a device.
DEVICES = "--devices "
MEMORY = "--memory "
# What a model can be cast to, by the name of the flag.
DTYPES = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
)


def _sorted(items: tuple[T, ...], key: Callable[[T], str], where: str) -> tuple[T, ...]:
    """`items` by name, `h.2` before `h.10`; raises `VerifyError` for a name given twice."""
    if len(items) < 2:
        return items
    names = [key(item) for item in items]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise VerifyError(f"{twice!r} is decided twice in {where}")
    return tuple(sorted(items, key=lambda item: _natural(key(item))))


@cache
def _natural(name: str) -> tuple[str | tuple[int, str], ...]:
    """Text and numbers alternate, so that equal positions compare equal types.

    A number is its length and digits: Python reads no more than 4,300 of them.
    """
    parts = re.split(r"0*([0-9]+)", name)
    return tuple((len(part), part) if i % 2 else part for i, part in enumerate(parts))


# The loss of a step is that of the whole batch, or the mean of those of its microbatches, each
# computed by itself, as single-device gradient accumulation does.
GLOBAL, MICROBATCH = BATCH_SEMANTICS = ("global", "microbatch")

OF_ONE_STAGE = "this is not yet there for pipelines, which are proved, run and simulated"

WIDE_DTYPES = ("float32", "float64")  # of masters and of the reduction of gradients


@dataclass(frozen=True, slots=True)
class NodeDecision:
    """Factor -> mesh axes (outermost first) of one operator; the axes are those of its stage."""

    key: str
    factors: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", _sorted(self.factors, lambda f: f[0], self.key))


@dataclass(frozen=True, slots=True)
class Storage:
    """How a stored tensor is chunked beyond its compute layout.

    Dim `dim` of the local compute shard is cut into chunks over the ranks of `axes` (which the
    compute layout replicates), of an optimizer state into ceil-chunks; `memory` is `device` or
    `host`.
    """

    axes: tuple[str, ...] = ()
    dim: int = 0
    memory: str = "device"


@dataclass(frozen=True, slots=True)
class ParameterDecision:
    """Storage of a parameter's weight, its gradient and its optimizer state (ZeRO 1-3): along one
    dim, the axes of each the first ones of the next. Where the weight is gathered in each pass it
    travels in `weight_sent`, its gradient in `gradient_sent`, where these are given
    (`quantization`).
    """

    name: str
    weight: Storage = Storage()
    gradient: Storage = Storage()
    optimizer: Storage = Storage()
    weight_sent: str = field(default="", kw_only=True)
    gradient_sent: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class ActivationDecision:
    """What a block call does with its activations: keep, recompute or offload.

    `recompute` without lists recomputes the whole block from its inputs. With lists it recomputes
    values: `values` are operators of the block, by their keys in it (`attention:softmax#0`), whose
    results and all redistributions of them are made again in the backward pass; `moves` are
    operators, or inputs of the block, of which only the redistributions are made again.
    """

    prefix: str
    policy: str = "keep"
    values: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"the recomputation of {self.prefix or '(top)'}"
        object.__setattr__(self, "values", _sorted(self.values, str, f"the values of {where}"))
        object.__setattr__(self, "moves", _sorted(self.moves, str, f"the moves of {where}"))

    @property
    def lists(self) -> bool:
        """Whether it is about values of the block, and not about the whole."""
        return bool(self.values or self.moves)


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex set of items of main's body, the devices that compute them, and their mesh.

    `items` are keys of operators and prefixes of block calls; none are all. `devices` are ranks of
    the cluster, in ascending ranges; the mesh numbers them from 0 in this order. `microbatches` are
    those of the step that it runs, in ascending order; none are all. Stages that run the same ones
    are a replica of the model. `at_once`: how many of the step's microbatches one of its own is.
    """

    items: tuple[str, ...]
    devices: tuple[range, ...]
    mesh: Mesh
    microbatches: tuple[int, ...] = ()
    at_once: int = 1

    @property
    def rank_devices(self) -> tuple[int, ...]:
        """The device of each rank of its mesh."""
        devices = [device for part in self.devices for device in part]
        return tuple(devices[at] for at in self.mesh.devices)


def one_stage(mesh: Mesh) -> tuple[Stage, ...]:
    """The stage that has all items, on as many of the first ranks as `mesh` numbers."""
    return (Stage((), (range(mesh.num_ranks),), mesh),)


ONE_DEVICE = one_stage(Mesh(()))


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a schedule, printed `F0`, `2B0` (of stage 2), `REDUCE`, `STEP`, `GATHER`."""

    kind: str
    microbatch: int | None = None
    stage: int = 0

    def __str__(self) -> str:
        if self.microbatch is None:
            return self.kind
        return f"{self.stage or ''}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer's class name (torch.optim) and the defaults it was planned with."""

    name: str = "adamw"
    num_states: int = 2

    @property
    def norm_passes(self) -> int:
        """Passes over the weights for norms of each of them and of its update, which scale its step
        (LAMB: You et al., 2020, arXiv:1904.00962, algorithm 2).
        """
        return 2 if self.name == "lamb" else 0


NO_OPTIMIZER = Optimizer("none", 0)  # of a plan that trains nothing


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything that the search chooses.

    `actions` are the lists of the groups of devices that have the same stages, in the order of
    their first stage; none where `schedule` makes them.
    """

    stages: tuple[Stage, ...] = ONE_DEVICE
    nodes: tuple[NodeDecision, ...] = ()
    parameters: tuple[ParameterDecision, ...] = ()
    activations: tuple[ActivationDecision, ...] = ()
    num_microbatches: int = 1
    schedule: str = "one_stage"
    actions: tuple[tuple[Action, ...], ...] = ()
    rewrites: tuple[str, ...] = ()
    batch_semantics: str = GLOBAL
    batch_norm: str = "global"
    master_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _sorted(self.nodes, lambda n: n.key, "nodes"))
        object.__setattr__(
            self, "parameters", _sorted(self.parameters, lambda p: p.name, "parameters")
        )
        object.__setattr__(
            self, "activations", _sorted(self.activations, lambda a: a.prefix, "activations")
        )

    @property
    def mesh(self) -> Mesh:
        """The mesh of the only stage; raises `NotYetError` where there are several."""
        if len(self.stages) > 1:
            raise NotYetError(OF_ONE_STAGE)
        return self.stages[0].mesh

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each replica of the model, in the order of their first stages."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, stage in enumerate(self.stages):
            found.setdefault(stage.microbatches, []).append(index)
        return tuple(map(tuple, found.values()))

    def microbatches_of(self, stage: int) -> tuple[int, ...]:
        """Those that a stage runs, numbered as its own where it runs several at once."""
        own = self.stages[stage]
        return own.microbatches or tuple(range(self.num_microbatches // own.at_once))

    @property
    def num_ranks(self) -> int:
        """The devices that some stage has."""
        if len(self.stages) == 1:
            return self.stages[0].mesh.num_ranks
        return len({d for stage in self.stages for part in stage.devices for d in part})

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """Data types in which some weight or gradient travels that are not its own."""
        every = ((p.weight_sent, p.gradient_sent) for p in self.parameters)
        return tuple(sorted({dtype for own in every for dtype in own if dtype}))

    @property
    def accumulates(self) -> bool:
        """Whether the program is that of one of several microbatches, each by itself."""
        return self.batch_semantics == MICROBATCH and self.num_microbatches > 1

    @property
    def apart(self) -> int:
        """How many equal parts of a step the program is one of."""
        return self.num_microbatches if self.accumulates else 1

    def node(self, key: str) -> NodeDecision | None:
        return next((n for n in self.nodes if n.key == key), None)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model came from, so that `verify` and `run` can build it again.

    `dtype` is what the model was cast to, None where it was left as it is.
    """

    spec: str
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None

    @property
    def is_factory(self) -> bool:
        """Whether a user's function makes the batch, so that --batch and --seq are refused."""
        return ":" in self.spec and not self.spec.startswith("zoo:")

    @property
    def name(self) -> str:
        """The model in a sentence."""
        return self.spec.removeprefix(LIVE)

    @property
    def is_live(self) -> bool:
        """Whether the model lives in the process that planned it, which alone can copy it."""
        return self.spec.startswith(LIVE)

    @property
    def is_config(self) -> bool:
        """Whether the model is built from a Hugging Face config."""
        return ":" not in self.spec


@dataclass(frozen=True, slots=True)
class Inference:
    """What a plan of forward passes alone serves, beside its own graph and decisions.

    With `new_tokens` after each prompt the plan's graph is the program of one token, and the first
    of them comes of the `prefill_graph` (as text), which has the same weights and caches where they
    lie and splits operators as `prefill_nodes` say. Without, the plan's graph is all there is.
    `cache_bytes` are those of the device that has most. `steps`: how often the pass of a model that
    generates no tokens runs for an answer, as a denoiser's does. `weights`: what products have
    theirs in, int8 or fp8 with a scale for each output channel, where that is not their own dtype.
    `period_s`: of a model of one pass in several stages, from one batch of requests to the next,
    where stages begin a pass while others are at the one before it.
    """

    new_tokens: int = 0
    prefill_graph: str = ""
    prefill_nodes: tuple[NodeDecision, ...] = ()
    prefill: Prediction | None = None
    cache_bytes: int = 0
    steps: int = 1
    weights: str | None = None
    period_s: float | None = None

    def __post_init__(self) -> None:
        nodes = _sorted(self.prefill_nodes, lambda n: n.key, "nodes of the prompt's program")
        object.__setattr__(self, "prefill_nodes", nodes)

    def answer_s(self, pass_s: float) -> float:
        """The time of an answer, where a pass of the plan's graph takes so long."""
        if self.prefill is None:
            return self.steps * pass_s
        return self.prefill.step_s + (self.new_tokens - 1) * pass_s

    def batch_s(self, pass_s: float) -> float:
        """The time from one batch of answers to the next."""
        return self.answer_s(pass_s) if self.period_s is None else self.period_s

    def counted(self, one: Prediction, objective: Objective) -> Prediction:
        """A batch of answers, where `one` is a pass of the plan's graph: the time that an objective
        counts, and what a device holds at most in either program.
        """
        both = (one, *([self.prefill] if self.prefill else []))
        peaks: dict[str, int] = {}
        for device, peak in (pair for found in both for pair in found.peaks):
            peaks[device] = max(peaks.get(device, 0), peak)
        time_of = self.batch_s if objective is Objective.THROUGHPUT else self.answer_s
        return replace(
            one,
            step_s=time_of(one.step_s),
            peak_bytes=max(found.peak_bytes for found in both),
            peaks=tuple(peaks.items()),
        )

    @property
    def passes(self) -> tuple[int, int]:
        """How often the prompt's program runs for an answer, and the plan's own."""
        return (1, self.new_tokens - 1) if self.new_tokens else (0, self.steps)


@dataclass(frozen=True, slots=True)
class Plan(Shown):
    """A saved answer: the question (fingerprint, source, cluster), the decisions, the prediction.

    `graph` is the captured training program as text (`ir.text`), so that no rank captures again;
    `evaluation_graph` the one captured in evaluation mode, empty where that is not possible.
    `settings` are the process's settings of torch that were not its defaults: (name, value).
    `ranges` are the least and largest value of inputs: (input, least, largest). A plan for
    `inference` trains nothing; its `prediction` and `bound_s` are of one pass of `graph`.
    """

    source: ModelSource
    cluster: str
    fingerprint: str
    optimizer: Optimizer
    method: str
    decisions: Decisions
    graph: str
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    assumptions: tuple[str, ...] = ()
    seed: int = 0
    bound_s: float | None = None
    solver_gap: float | None = None
    status: Status = Status.COMPLETE
    version: str = VERSION
    notes: tuple[str, ...] = ()
    evaluation_graph: str = ""
    constraints: tuple[Constraint, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    ranges: tuple[tuple[str, float, float], ...] = ()
    aim: Aim | None = None
    inference: Inference | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the search was stopped before it was over."""
        return self.status is Status.INTERRUPTED

    @property
    def gap(self) -> float | None:
        """By which share of the bound the plan is above it; None where there is no bound."""
        if self.aim is not None:
            return self.aim.value / self.aim.bound - 1 if self.aim.bound else None
        if not self.bound_s or self.prediction is None:
            return None
        return (self.prediction.step_s - self.bound_s) / self.bound_s

    @property
    def counted(self) -> Prediction | None:
        """What alternatives and constraints are compared with: the step, or a batch of answers."""
        if self.prediction is None or self.inference is None or self.aim is None:
            return self.prediction
        return self.inference.counted(self.prediction, self.aim.objective)

    @property
    def own(self) -> int | None:
        """Which of the alternatives is the plan: the first of those with its step and its peak."""
        if self.counted is None:
            return None
        wanted = self.counted.step_s, self.counted.peak_bytes
        own = ((other.step_s, other.peak_bytes) == wanted for other in self.alternatives)
        return next((index for index, is_own in enumerate(own) if is_own), None)

    @property
    def name(self) -> str:
        """As its candidate is called in tables; its method where that is not recorded."""
        return self.method if self.own is None else self.alternatives[self.own].name

    def report(self, run: str | None = None) -> Any:
        """The page of `parloom report`, inside a notebook or to be saved; `run` is a run's log."""
        return asked(self, "report", run)

    def show_sharding(self, what: Any, model: Any = None) -> Any:
        """Which device holds which part of a tensor: of a name, or a parameter of `model`."""
        return asked(self, "show_sharding", what, model)

    def explain(self, name: str | None = None, versus: str | None = None) -> Any:
        """What `parloom explain` says: of the plan, of a name, or beside another method or plan."""
        return asked(self, "explain", name, versus)

    def command(self) -> str:
        """The command that makes such a plan again, from what is recorded here."""
        source, names = self.source, {long: short for short, long in DTYPES.items()}
        flags = {
            "--cluster": self.cluster,
            "--batch": source.batch,
            "--seq": source.seq,
            "--dtype": names.get(source.dtype or "", source.dtype),
            "--optimizer": None if self.inference else self.optimizer.name,
            "--new-tokens": (self.inference and self.inference.new_tokens) or None,
            "--steps": self.inference and self.inference.steps,
            "--weights": self.inference and self.inference.weights,
            "--method": self.method,
            "--objective": None if self.aim is None else self.aim.objective.value,
            "--microbatches": None if self.inference else self.decisions.num_microbatches,
            "--batch-semantics": self.decisions.batch_semantics,
            "--seed": self.seed,
        }
        usual = {"--microbatches": 1, "--steps": 1, "--batch-semantics": GLOBAL, "--seed": 0}
        if source.is_live:
            given = ((flag[2:].replace("-", "_"), value) for flag, value in flags.items())
            asked = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
            return f"parloom.plan(model, batch, {asked})"
        words = ["parloom", "plan", source.spec, *(["--inference"] if self.inference else [])]
        for flag, value in flags.items():
            if value is not None and value != usual.get(flag):
                words += [flag, str(value)]
        for constraint in self.constraints:
            flag, _, asked = constraint.text.partition(" ")
            words += [flag, asked] if flag.startswith("--") else []
        return shlex.join(words)
