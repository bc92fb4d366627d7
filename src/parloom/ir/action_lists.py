"""Action lists of a plan: read, and checked for completeness and deadlock before anything runs."""

from collections import Counter
from collections.abc import Iterable, Sequence

from parloom.action_text import ONCE, passes_beside, read_action, stages_text
from parloom.errors import InputError
from parloom.ir.plan import Action


def parse_action(text: str) -> Action:
    """`F0`, `2B0`, `STEP`; raises `InputError` for anything else."""
    found = read_action(text)
    if found is None:
        raise InputError(
            f"no action {text!r}: an action is {', '.join(ONCE)}, or a stage (left out: 0), F, B or"
            " W, and a microbatch, as in F0 and 2B0"
        )
    kind, stage, microbatch = found
    return Action(kind, microbatch, stage)


def check_lists(
    groups: Sequence[Sequence[int]],
    lists: Sequence[Sequence[Action]],
    edges: Iterable[tuple[int, int, bool]],
    microbatches: Sequence[Sequence[int]],
) -> None:
    """Raise `InputError` unless the lists of the groups of devices run a step.

    `groups` are the stages of each; `edges` are (source, target, whether a gradient comes back).
    Every stage runs each of its `microbatches` forward and backward once, with W for all of them or
    none; each list ends with the step program; and no list waits for one that waits for it.
    """
    if len(lists) != len(groups):
        raise InputError(f"{len(lists)} action lists for {len(groups)} groups of devices")
    for stages, own in zip(groups, lists, strict=True):
        _check_complete(stages, own, microbatches)
    _check_order(lists, list(edges), [len(own) for own in microbatches])


def _check_complete(
    stages: Sequence[int], own: Sequence[Action], microbatches: Sequence[Sequence[int]]
) -> None:
    where = f"the list of {stages_text(stages)}"
    passes = [a for a in own if a.microbatch is not None]
    last = [a.kind for a in own[len(passes) :]]
    if last != list(ONCE):
        raise InputError(f"{where} ends with {' '.join(last) or 'a pass'}, not {' '.join(ONCE)}")
    found = Counter(passes)
    twice = next((a for a, times in found.items() if times > 1), None)
    if twice is not None:
        raise InputError(f"{where} has {twice} {found[twice]} times; leave one")
    split = {a.stage for a in passes if a.kind == "W"}
    for stage in stages:
        for kind in ("F", "B", *(["W"] if stage in split else [])):
            for microbatch in microbatches[stage]:
                if Action(kind, microbatch, stage) not in found:
                    raise InputError(
                        f"{where} lacks {Action(kind, microbatch, stage)}:"
                        f" {len(microbatches[stage])} microbatches run"
                        f" {'F, B and W' if stage in split else 'F and B'} each"
                    )
                del found[Action(kind, microbatch, stage)]
    if found:
        raise InputError(f"{where} has {next(iter(found))}, which is not its to run")


def _check_order(
    lists: Sequence[Sequence[Action]],
    edges: Sequence[tuple[int, int, bool]],
    counts: Sequence[int],
) -> None:
    """Run all lists: each goes on as far as what it reads has been made."""
    done: set[Action] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for index, own in enumerate(lists):
            while at[index] < len(own) and not _missing(own[at[index]], edges, counts, done):
                done.add(own[at[index]])
                at[index] += 1
                moved = True
    stuck = [i for i, own in enumerate(lists) if at[i] < len(own)]
    if stuck:
        waits = (
            f"{lists[i][at[i]]} waits for {_missing(lists[i][at[i]], edges, counts, done)[0]}"
            for i in stuck
        )
        raise InputError(f"the action lists wait for each other: {', '.join(waits)}")


def _missing(
    action: Action,
    edges: Sequence[tuple[int, int, bool]],
    counts: Sequence[int],
    done: set[Action],
) -> list[Action]:
    """What an action reads that has not been made."""
    if action.microbatch is None:
        return []
    stage, microbatch = action.stage, action.microbatch

    def beside(kind: str, other: int) -> list[Action]:
        passes = passes_beside(microbatch, counts[stage], counts[other])
        return [Action(kind, each, other) for each in passes]

    if action.kind == "F":
        needs = [need for source, to, _ in edges if to == stage for need in beside("F", source)]
    elif action.kind == "W":
        needs = [Action("B", microbatch, stage)]
    else:
        needs = [Action("F", microbatch, stage)]
        for source, to, back in edges:
            needs += beside("B", to) if source == stage and back else []
    return [need for need in needs if need not in done]
