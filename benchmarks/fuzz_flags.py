"""Random command lines."""

import random
from collections.abc import Mapping
from pathlib import Path

Command = tuple[str, ...]
Made = tuple[tuple[Command, ...], tuple[tuple[str, bytes], ...], tuple[str, ...]]

WORDS: Mapping[str, tuple[str, ...]] = {
    "--cluster": ("2xcpu", "1xcpu", "4xcpu", "2x2xcpu", "levels.yaml", "2xH100", "cpu", "0xcpu",
                  "9999999xcpu", "lab.yaml", "", "-1xcpu", "2xnothing", "é", "{", "{}", "."),
    "--batch": ("4", "1", "0", "-1", "x", "", "1e3", "99999999999999999999", "3"),
    "--seq": ("8", "0", "x", "1000000000"),
    "--dtype": ("fp32", "bf16", "fp64", "fp16", "int8", "", "FP32"),
    "--optimizer": ("adamw", "sgd", "AdamW", "lbfgs", "nothing", "", "os.system", "muon"),
    "--method": ("data_parallel", "fsdp", "megatron", "auto", "alpa", "random", "nothing", "",
                 "mlp.plan.json", "models.py", ".", "train.py"),
    "--memory": ("1GiB", "1B", "0", "-1GB", "x", "", "1e400GB", "nan", "70 GB", "16KiB", "70%"),
    "--microbatches": ("1", "2", "3", "0", "4", "x"),
    "--calibration": ("calibration.json", "nothing.json", "", ".", "models.py", "/dev/null"),
    "--pin": ("first=n:data", "first=replicated", "blocks.0=recompute", "mesh=2", "mesh=2x2", "",
              "=", "x=y", "first.weight=weights:sharded", "mesh=0", "first=", "*", "mesh=-1"),
    "--forbid": ("first=n:data", "mesh=2", "", "x", "blocks.0=recompute"),
    "--objective": ("time", "cost", "memory", "x", ""),
    "--budget": ("1", "100", "0", "-1", "x"),
    "--require-gap": ("0.2", "0", "nan", "inf", "-1", "x", "100"),
    "--batch-semantics": ("global", "microbatch", "x", ""),
    "--batch-norm": ("global", "local", ""),
    "--seed": ("0", "1", "-1", "x", "99999999999999999999"),
    "--out": ("out", "", "models.py", "/dev/null", "/proc/x", "a/b/c", "é \u202e", "/dev/full"),
    "--trace": ("trace.json", "", ".", "models.py/x", "/dev/full", "/proc/x"),
    "--versus": ("fsdp", "data_parallel", "megatron", "mlp.plan.json", "x", "", "auto"),
    "--to": ("deepspeed", ""),
    "--model": ("models.py:mlp",),
    "--plan": ("mlp.plan.json",),
    "--json": (), "--verbose": (), "-v": (), "--shrink": (), "--known": (), "--help": (),
    "--version": (), "--nothing": ("x",), "--": (), "-": (),
}  # fmt: skip
PLAN_FLAGS = (*tuple(WORDS)[:18], "--json", "-v")
VERBS: Mapping[str, tuple[str, ...]] = {
    "plan": PLAN_FLAGS,
    "verify": ("--shrink", "--json", "-v"),
    "simulate": ("--trace", "--calibration", "--json", "-v"),
    "explain": ("--versus", "--calibration", "--json", "-v"),
    "cluster": ("--known", "--json"),
    "calibrate": ("--cluster", "--out", "--json"),
    "doctor": ("--json",),
    "report": ("--json",),
    "export": ("--to",),
    "run": ("-v",),
}  # fmt: skip
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "plan": ("models.py:mlp", "models.py:conv", "models.py:tokens", "gpt2.json", "zoo:nothing",
             "models.py:broken", "models.py:nothing", "models.py", "models:mlp", "nothing:x", "",
             ".", "/", "x.pt2", "zoo:", "llama.json", "gpt2", "a:b:c", "é", "train.py:x", ":", "-"),
    "cluster": ("show", "check", "init", "", "show 2xcpu", "check levels.yaml", "show parts.yaml",
                "check nothing.yaml", "show 2x8xH100", "check ."),
    "run": ("mlp.plan.json -- nothing.py", "mlp.plan.json --", "mlp.plan.json", "conv.plan.json x",
            "mlp.plan.json -- .", "nothing -- train.py", "mlp.plan.json -- -m nothing_there"),
    # A valid one measures the machine for a minute.
    "calibrate": ("--model nothing:x", "--plan nothing.json", "--nothing", "x",
                  "--out models.py/x"),
    "doctor": ("", "x"),
}  # fmt: skip
PLANS = ("mlp.plan.json", "conv.plan.json", "tokens.plan.json", "auto.plan.json", "one.plan.json",
         "nothing.json", ".", "", "models.py", "calibration.json", "/dev/null", "é",
         "levels.yaml")  # fmt: skip


def flags_case(rng: random.Random, base: Path) -> Made:
    """One command line, or a plan and what follows it."""
    if rng.random() < 0.1:
        seed = str(rng.randrange(3))
        flags = flags_of("plan", rng)
        plan = ("plan", "models.py:mlp", "--cluster", "2xcpu", "--out", "out", "--seed", seed)
        after = rng.sample([("verify", "out"), ("simulate", "out"), ("explain", "out", "first")], 2)
        return ((*plan, *flags), *after), (), ()
    weights = [12 if verb == "plan" else 4 for verb in VERBS]
    weights[-1] = 1
    verb = rng.choices(list(VERBS), weights)[0]
    subject = rng.choice(SUBJECTS.get(verb, PLANS))
    words = [verb, *(subject.split(" ") if verb in SUBJECTS and subject else [subject])]
    if verb == "plan" and rng.random() < 0.9:
        words += ["--cluster", rng.choice(WORDS["--cluster"][:5])]
    if verb == "explain" and rng.random() < 0.4:
        words.append(rng.choice(("first", "second.weight", "x", "", "linear#1", "loss", "é")))
    words += flags_of(verb, rng)
    if rng.random() < 0.05:
        rng.shuffle(words)
    if rng.random() < 0.05:
        words.pop(rng.randrange(len(words)))
    return (tuple(words),), (), ()


def flags_of(verb: str, rng: random.Random) -> list[str]:
    """Flags of the verb, at times another verb's, with values that may be nonsense."""
    words = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        flag = rng.choice(VERBS[verb] if rng.random() < 0.9 else tuple(WORDS))
        words.append(flag)
        if WORDS[flag] and rng.random() < 0.97:
            words.append(rng.choice(WORDS[flag]))
    return words
