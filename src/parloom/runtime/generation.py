"""Passes of an inference plan: each leaves what the next one reads in caches on the ranks."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.runtime.batches import Batches
from parloom.runtime.caches import Caches
from parloom.runtime.comm import Comm
from parloom.runtime.evaluation import Evaluator
from parloom.runtime.part import make_parts, owned
from parloom.runtime.program import Action, Pipeline, Result, TensorSpec
from parloom.runtime.same import told_by_some
from parloom.runtime.shared import SharedParameters
from parloom.runtime.step import Stages
from parloom.runtime.store import Source
from parloom.runtime.told import Awaiting, Channel, Telling, Told, begin
from parloom.runtime.transfers import Transfers
from parloom.runtime.work import Work

Tensors = Mapping[str, Tensor]
TOKENS, GENERATED, LOGITS = "input_ids", "generated", "logits"  # inputs and an output of programs
CHOSEN, BEFORE = "tokens", "logits before them"  # of a pass that generates
PREFILL, DECODE, FORWARD = "prefill", "decode", "forward"  # names of programs


class Passes:
    """Passes that this rank has made its part of; other ranks may still be at theirs."""

    def __init__(self, told: Sequence[Mapping[str, Telling]]) -> None:
        self._told = told

    def wait(self) -> list[dict[str, Tensor]]:
        """What every rank is told of each pass."""
        return [{name: one.whole() for name, one in told.items()} for told in self._told]


class Server:
    """One rank of an inference plan; every rank makes the same calls in the same order.

    `programs` are those of the plan by name, of the same stages, with the same weights and caches.
    `tensors` gives full parameters and buffers by the user's names.

    Ranks wait for what they read, and for nothing else: stages begin a pass while later ones are at
    those before it.
    """

    def __init__(
        self,
        programs: Mapping[str, Pipeline],
        tensors: Tensors | Source,
        comm: Comm,
        device: torch.device | None = None,
    ) -> None:
        source = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.comm, self.device = comm, device or torch.device("cpu")
        first, *others = programs.values()
        parts = make_parts(
            first,
            tuple(others),
            source,
            comm,
            self.device,
            None,
            seed=0,
            exact_random=False,
            watch=lambda text: None,
        )
        transfers = Transfers(first, ((),) * first.num_ranks, comm, self.device)
        shared = SharedParameters(first, parts, comm, self.device)
        stages = Stages(first, parts, (), transfers, shared, comm, owned(parts, first))
        self._pipelines, self._parts = dict(programs), {part.stage: part for part in parts}
        self._evaluators = {name: Evaluator(own, stages) for name, own in programs.items()}
        self._caches = {part.stage: Caches(part.program, part.comm, self.device) for part in parts}
        numbers = count()
        self._channels = {
            name: {
                key: Channel(own, told, next(numbers), comm, self.device)
                for key, told in _told(own, generates=name != FORWARD).items()
            }
            for name, own in programs.items()
        }
        self._under_way: deque[tuple[list[Work], Passes]] = deque()

    @property
    def most_under_way(self) -> int:
        """The passes that are under way at once, at most: a message between two stages may take as
        long as either of them.
        """
        return 2 * len(next(iter(self._pipelines.values())).programs)

    def run(self, name: str, batch: Tensors) -> dict[str, Tensor]:
        """The full outputs of one pass of the program `name`, on every rank."""
        return self.begin(name, batch).wait()[0]

    def begin(self, name: str, batch: Tensors) -> Passes:
        """Make this rank's part of one pass of the program `name`, whose outputs are told."""
        self._check(name, batch)
        programs = self._pipelines[name].programs
        outputs = dict.fromkeys(spec.name for program in programs for spec in program.outputs)
        return Passes([self._pass(name, batch, tuple(outputs))])

    def generate(self, prompts: Tensor, new_tokens: int) -> tuple[Tensor, list[Tensor]]:
        """The likeliest token after each prompt, and so on: `[batch, new_tokens]`, and the logits
        that each was chosen by; on every rank.
        """
        found = self.begin_tokens(prompts, new_tokens, (CHOSEN, BEFORE)).wait()
        return torch.cat([own[CHOSEN] for own in found], dim=1), [own[BEFORE] for own in found]

    def begin_tokens(
        self, prompts: Tensor, new_tokens: int, outputs: Sequence[str] = (CHOSEN,)
    ) -> Passes:
        """Make this rank's part of the passes that generate so many tokens after each prompt; each
        pass tells those that it has `CHOSEN`.
        """
        self._check(PREFILL, {TOKENS: prompts})
        found = [self._pass(PREFILL, {TOKENS: prompts}, outputs)]
        for index in range(1, new_tokens):
            batch = {GENERATED: torch.tensor(index)}
            found.append(self._pass(DECODE, batch, outputs, found[-1][CHOSEN]))
        return Passes(found)

    def _pass(
        self, name: str, batch: Tensors, outputs: Sequence[str], tokens: Telling | None = None
    ) -> dict[str, Telling]:
        """This rank's part of a pass, which is given the `tokens` that the one before it chose."""
        pipeline, channels = self._pipelines[name], self._channels[name]
        programs, told = pipeline.programs, begin({key: channels[key] for key in outputs}, pipeline)
        batches = {
            stage: Batches(programs[stage], part.ctx, batch, {})
            if tokens is None
            else Awaiting(programs[stage], part.ctx, batch, TOKENS, tokens)
            for stage, part in self._parts.items()
        }

        def tell(action: Action, result: Result, comm: Comm) -> None:
            for one in told.values():
                if one.stage == action.stage:
                    one.tell(result.outputs, comm, action.microbatch)

        sent = self._evaluators[name].forward(batches, tell, self._caches)
        self._under_way.append((sent, Passes([told])))
        if len(self._under_way) > self.most_under_way:
            before, passes = self._under_way.popleft()
            for work in before:
                work.wait()
            passes.wait()
        return told

    def _check(self, name: str, batch: Tensors) -> None:
        """Raise `InputError` for a batch that the program `name` was not made for."""
        for spec in self._pipelines[name].inputs:
            given = batch.get(spec.name)
            if given is None or tuple(given.shape) != spec.shape:
                has = "nothing" if given is None else str(list(given.shape))
                raise InputError(
                    f"input {spec.name!r} of the {name} program is {list(spec.shape)}, got {has}"
                )

    def caches(self) -> dict[str, Tensor]:
        """The whole caches, on every rank."""
        found: dict[str, Tensor] = {}
        pipeline = next(iter(self._pipelines.values()))
        for stage, program in enumerate(pipeline.programs):
            own = self._caches.get(stage)
            for spec in program.caches:
                whole = None if own is None else own.whole(spec)
                if len(pipeline.programs) > 1:
                    mine = whole if self.comm.rank == pipeline.ranks[stage][0] else None
                    whole = told_by_some(mine, spec.shape, spec.dtype, self.comm, self.device)
                assert whole is not None
                found[spec.name] = whole
        return found


def _told(pipeline: Pipeline, *, generates: bool) -> dict[str, Told]:
    """What a pass can tell: its outputs, and of the logits of one that `generates` those at the
    last position and the token that is chosen by them.
    """
    specs = [spec for program in pipeline.programs for spec in program.outputs]
    found = {spec.name: Told(spec.name, spec) for spec in specs}
    for spec in specs:
        if generates and spec.name == LOGITS:
            batch, _, classes = spec.shape
            rows, _, columns = spec.dims
            found[CHOSEN] = Told(
                LOGITS, TensorSpec(CHOSEN, (batch, 1), "int64", (rows, (1,))), chosen
            )
            found[BEFORE] = Told(
                LOGITS, TensorSpec(BEFORE, (batch, classes), spec.dtype, (rows, columns)), last
            )
    return found


def last(logits: Tensor) -> Tensor:
    """The logits [batch, classes] at the last position of [batch, positions, classes]."""
    return logits[:, -1]


def chosen(logits: Tensor) -> Tensor:
    """The likeliest token [batch, 1] after the last position of [batch, positions, classes]."""
    return last(logits).argmax(-1, keepdim=True)
