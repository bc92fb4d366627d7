"""Passes of an inference plan: each leaves what the next one reads in caches on the ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from parloom.errors import InputError
from parloom.runtime.batches import Batches
from parloom.runtime.caches import Caches
from parloom.runtime.comm import Comm
from parloom.runtime.evaluation import Evaluator
from parloom.runtime.part import make_parts, owned
from parloom.runtime.program import Pipeline
from parloom.runtime.same import told_by_some
from parloom.runtime.shared import SharedParameters
from parloom.runtime.step import Stages
from parloom.runtime.store import Source
from parloom.runtime.transfers import Transfers

Tensors = Mapping[str, Tensor]
TOKENS, GENERATED, LOGITS = "input_ids", "generated", "logits"  # inputs and an output of programs
PREFILL, DECODE, FORWARD = "prefill", "decode", "forward"  # names of programs


class Server:
    """One rank of an inference plan; every rank makes the same calls in the same order.

    `programs` are those of the plan by name, of the same stages, with the same weights and caches.
    `tensors` gives full parameters and buffers by the user's names.
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

    def run(self, name: str, batch: Tensors) -> dict[str, Tensor]:
        """The full outputs of one pass of the program `name`, on every rank."""
        pipeline = self._pipelines[name]
        for spec in pipeline.inputs:
            given = batch.get(spec.name)
            if given is None or tuple(given.shape) != spec.shape:
                has = "nothing" if given is None else str(list(given.shape))
                raise InputError(
                    f"input {spec.name!r} of the {name} program is {list(spec.shape)}, got {has}"
                )
        batches = {
            stage: Batches(pipeline.programs[stage], part.ctx, batch, {})
            for stage, part in self._parts.items()
        }
        return self._evaluators[name].run(batches, self._caches).outputs

    def generate(self, prompts: Tensor, new_tokens: int) -> tuple[Tensor, list[Tensor]]:
        """The likeliest token after each prompt, and so on: `[batch, new_tokens]`, and the logits
        that each was chosen by.
        """
        made, logits, given = list[Tensor](), list[Tensor](), prompts
        for index in range(new_tokens):
            batch = {TOKENS: given}
            if index:
                batch[GENERATED] = torch.tensor(index)
            found = self.run(DECODE if index else PREFILL, batch)[LOGITS][:, -1]
            logits.append(found)
            given = found.argmax(-1, keepdim=True)
            made.append(given)
        return torch.cat(made, dim=1), logits

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
