"""What is fuzzed: the files that are mutated, and the command lines that read them.

Every case is a function of kind, seed and index.
"""

import hashlib
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzz_base import CLUSTERS, FAMILIES, config_of
from fuzz_flags import Command, Made, flags_case
from fuzz_mutations import as_json, changed, mutated_bytes

KINDS = ("cluster", "plan", "calibration", "hugging_face", "flags")


@dataclass(frozen=True)
class Case:
    """Commands that are run one after the other in a folder with some files.

    `named` are words of which the message of exit 2 has to have one.
    """

    kind: str
    seed: int
    index: int
    commands: tuple[Command, ...]
    files: tuple[tuple[str, bytes], ...]
    named: tuple[str, ...] = ()

    def write(self, base: Path, folder: Path) -> None:
        """The files of this case beside those that it leaves alone."""
        shutil.copytree(base, folder)
        for name, content in self.files:
            (folder / name).write_bytes(content)


def case(kind: str, seed: int, index: int, base: Path) -> Case:
    """The case of that number."""
    rng = random.Random(f"{kind} {seed} {index}")
    make = {
        "cluster": cluster_case,
        "plan": plan_case,
        "calibration": calibration_case,
        "hugging_face": config_case,
        "flags": flags_case,
    }
    commands, files, named = make[kind](rng, base)
    return Case(kind, seed, index, commands, files, named)


def cluster_case(rng: random.Random, base: Path) -> Made:
    name = f"{rng.choice(list(CLUSTERS))}.yaml"
    data = (base / name).read_bytes()
    if rng.random() < 0.6:
        document = yaml.safe_load(data)
        for _ in range(rng.choice((1, 1, 2))):
            document, _ = changed(document, rng)
        flow = rng.choice((True, False, None))
        data = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True).encode()
    if rng.random() < 0.5:
        data = mutated_bytes(data, rng)
    verb = rng.random()
    command: Command = ("cluster", rng.choice(("check", "show")), name)
    if verb < 0.4:
        method = rng.choice(("data_parallel", "data_parallel", "fsdp", "auto"))
        command = ("plan", "models.py:wide", "--cluster", name, "--method", method)
    if rng.random() < 0.3:
        command = (*command, "--json")
    return (command,), ((name, data),), (name, "do not divide", "unequal parts")


def calibration_case(rng: random.Random, base: Path) -> Made:
    name = "calibration.json"
    data = (base / name).read_bytes()
    if rng.random() < 0.7:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 2))):
            document, _ = changed(document, rng)
        data = as_json(document)
    if rng.random() < 0.4:
        data = mutated_bytes(data, rng)
    command: Command = rng.choice(
        (
            ("simulate", "mlp.plan.json"),
            ("simulate", "tokens.plan.json", "--json"),
            ("explain", "tokens.plan.json"),
            ("plan", "models.py:mlp", "--cluster", "4xcpu", "--method", "data_parallel"),
            ("plan", "models.py:mlp", "--cluster", "2xcpu"),
        )
    )
    return ((*command, "--calibration", name),), ((name, data),), (name,)


def plan_case(rng: random.Random, base: Path) -> Made:
    name = f"{rng.choice(('mlp', 'conv', 'tokens', 'one', 'auto'))}.plan.json"
    data = (base / name).read_bytes()
    kind = rng.random()
    if kind < 0.75:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            document = changed_plan(document, rng)
        data = as_json(document)
    else:
        data = mutated_bytes(data, rng)
    verb = rng.random()
    commands: list[Command] = [("simulate", name), ("explain", name)]
    if verb < 0.3:
        commands = [("verify", name)]
    elif verb < 0.33:
        commands = [("verify", name, "--shrink")]
    elif verb < 0.34:
        commands = [("run", name, "--", "train.py")]
    elif verb < 0.5:
        words = ("first", "weight", "head", "blocks.0", "x", "linear#0", "nothing")
        commands = [("explain", name, rng.choice(words)), ("explain", name, "--versus", "fsdp")]
    named = (name, "graph", "invalid plan", "no operator, parameter", "can be shrunk")
    return tuple(commands), ((name, data),), named


def changed_plan(document: Any, rng: random.Random) -> Any:
    """A decision, a line of the program (with its digest), or anything else."""
    kind = rng.random()
    if not isinstance(document, dict) or kind < 0.25:
        return changed(document, rng)[0]
    part = "decisions" if kind < 0.6 else rng.choice(("graph", "graph", "evaluation_graph"))
    if part not in document:
        return document
    if part == "decisions":
        return {**document, part: changed(document[part], rng)[0]}
    programs = [document.get(name, []) for name in ("graph", "evaluation_graph")]
    if not all(isinstance(p, list) and all(isinstance(line, str) for line in p) for p in programs):
        return document  # it was changed before
    lines = document[part]
    if not lines:
        return document
    document = {**document, part: changed_program(lines, rng)}
    texts = ["\n".join(document.get(name, [])) for name in ("graph", "evaluation_graph")]
    digest = hashlib.sha256("\n\n".join(texts).encode("utf-8", "replace")).hexdigest()
    return {**document, "graphs_sha256": digest}


def changed_program(lines: list[str], rng: random.Random) -> list[str]:
    """The lines of a program with a token changed, or a line moved, repeated or left out."""
    result = list(lines)
    at = rng.randrange(len(result))
    kind = rng.random()
    if kind < 0.15:
        del result[at]
    elif kind < 0.25:
        result.insert(at, result[at])
    elif kind < 0.35:
        result.insert(rng.randrange(len(result)), result.pop(at))
    else:
        words = result[at].split(" ")
        word = rng.randrange(len(words))
        others = [w for line in lines for w in line.split(" ") if w]
        words[word] = rng.choice(
            (
                *rng.choices(others, k=6),
                *(
                    "0",
                    "-1",
                    "99999999999999999999",
                    "1.5",
                    "None",
                    "True",
                    "(",
                    "()",
                    "x",
                    "é",
                    "",
                ),
                *(
                    "aten.add.Tensor",
                    "aten.nothing",
                    "float64",
                    "[0]",
                    "[]",
                    "'x'",
                    "((((1,),),),)",
                ),
            )
        )
        result[at] = " ".join(words)
    return result


def config_case(rng: random.Random, base: Path) -> Made:
    family = rng.choice(list(FAMILIES))
    name = f"{family}.json"
    document = config_of(family)
    data, named = as_json(document), [name]
    if rng.random() < 0.9:
        for _ in range(rng.choice((1, 1, 1, 2))):
            document, key = changed(with_default(document, family, rng), rng)
            named.append(key)
            if not isinstance(document, dict):
                break
        data = as_json(document)
    else:
        data = mutated_bytes(data, rng)
    method = "auto" if rng.random() < 0.05 else "data_parallel"
    command: Command = ("plan", name, "--cluster", "2xcpu", "--method", method, "--batch", "2")
    if family not in ("vit", "resnet"):
        command = (*command, "--seq", "8")
    return (command,), ((name, data),), (name,)


def with_default(document: dict[str, Any], family: str, rng: random.Random) -> dict[str, Any]:
    """The configuration with one key more, at the family's default: to be changed next."""
    if rng.random() < 0.5:
        return document
    import transformers

    known = transformers.AutoConfig.for_model(family).to_dict()
    free = [key for key in known if key not in document and key != "model_type"]
    key = rng.choice(free)
    return {key: known[key], **document}
