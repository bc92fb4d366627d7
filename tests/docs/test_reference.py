"""The reference is what the code says: commands, models, keys of files and of `--json`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from pydantic import TypeAdapter
from transformers import GPT2Config

from parloom.cost.calibration import _Document
from parloom.execute.verify import VerifyReport
from parloom.ir.plan_schema import PlanDocument
from parloom.rewrite.known import known_rules, partial_rules
from tests.docs import reference
from tests.docs.cluster_schema import cluster_schema
from tests.docs.commands import run
from tests.docs.page import DOCS
from tests.workflows import SMALL

SCHEMAS = DOCS / "reference" / "schemas"
PLAN = "plan zoo:mlp --method fsdp --out"
# Of each verb the commands that show its keys; the first of all make the plans.
ASKED = {
    "plan": [
        f"{PLAN} runs/a --cluster 2x1xA100-80GB --memory 70GB --json",
        f"{PLAN} runs/b --cluster 2xcpu --json",
        "plan zoo:mlp --out runs/f --cluster 2xA100 --pin head=replicated --tokens 1B --json",
        "plan zoo:mlp --method gpipe --out runs/c --cluster 2xcpu --batch 256 --json",
    ],
    "plan-inference": [
        "plan zoo:mlp --inference --steps 4 --method data_parallel --out runs/h --cluster 2xcpu"
        " --json",
        "plan zoo:mlp --inference --pin mesh=2 --out runs/h --cluster 2xcpu --json",
        "plan small --inference --new-tokens 4 --batch 2 --seq 4 --method data_parallel"
        " --out runs/i --cluster 2xcpu --json",
    ],
    "infeasible": [
        f"{PLAN} runs/d --cluster 2xcpu --memory 6MB --json",
        "plan zoo:mlp --out runs/d --cluster 2xcpu --pin head=n:x --forbid head=n:x --json",
    ],
    "front": [
        f"{PLAN} runs/e --cluster 2xA100,2xH100 --price 2/gpu-h --pareto --json",
        f"{PLAN} runs/g --cluster 2xA100 --price 2/gpu-h --tokens 1B --days 30 --json",
        f"{PLAN} runs/h --cluster 2xA100 --price 2/gpu-h --tokens 1T --days 0.01 --json",
    ],
    "scale": [
        "scale zoo:mlp --cluster 2xA100 --method fsdp --json",
        "scale runs/b --json",
        "scale runs/f --weak --method data_parallel --json",
    ],
    "explain": ["explain runs/a --json", "explain runs/b --json", "explain runs/f --json"],
    "explain-name": ["explain runs/f head --json", "explain runs/a relu --json"],
    "explain-parameter": [
        "explain runs/f head.weight --json",
        "explain runs/a layers.0.bias --json",
        "explain runs/b layers.1.weight --json",
    ],
    "explain-input": ["explain runs/f x --json", "explain runs/b labels --json"],
    "explain-module": ["explain runs/f layers --json", "explain runs/b layers --json"],
    "explain-stages": ["explain runs/c head --json", "explain runs/c head.weight --json"],
    "explain-name-versus": ["explain runs/b layers.0 --versus megatron --json"],
    "explain-versus": ["explain runs/b --versus megatron --json"],
    "explain-pipeline": ["explain runs/c --json"],
    "simulate": ["simulate runs/b --json", "simulate runs/c --trace step.json --json"],
    "report": ["report runs/b --json"],
    "export": ["export runs/b --to slurm --json", "export runs/b --to deepspeed --json"],
    "cluster-show": ["cluster show 2x8xH100 --json", "cluster show 4xcpu --json"],
    "cluster-known": ["cluster show --known --json"],
    "cluster-check": ["cluster check 2xcpu --json"],
    "workflow-plan": [
        "workflow plan example:cameras --json",
        "workflow plan example:vqa --method jellybean --json",
    ],
    "workflow-simulate": [
        "workflow simulate example:cameras --requests 2000 --json",
        "workflow simulate example:vqa --requests 2000 --json",
    ],
    "workflow-profile": [
        f"workflow profile small.yaml --worker box --out box.yaml --repetitions {n} --json"
        for n in (3, 4)
    ],
    "doctor": ["doctor --json"],
}
SHALLOW = {"report": 1}
ON_A_GPU = {"cuda": "13.0", "gpus": ["NVIDIA H100"]}


@pytest.fixture(scope="session")
def documents() -> dict[str, list[Any]]:
    """What each verb prints; filled by the first test."""
    return {}


@pytest.fixture
def printed(reader: Path, documents: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if not documents:
        small = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=24, n_positions=8)
        small.architectures = ["GPT2LMHeadModel"]
        small.save_pretrained(reader / "small")
        text = SMALL.replace("fast: {", "fast: {model: 'zoo:mlp', ")
        (reader / "small.yaml").write_text(text, encoding="utf-8")
    for verb, commands in ASKED.items():
        if verb not in documents:
            documents[verb] = [json.loads(_stdout(command)) for command in commands]
    documents["doctor"] = [documents["doctor"][0] | own for own in ({"cuda": None}, ON_A_GPU)]
    return documents


def _stdout(command: str) -> str:
    out, _ = run(command.split())
    return out.partition("error: ")[0]


def parts_of(documents: dict[str, list[Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """The marked parts of all pages, and the schema files by name."""
    schemas = {
        "plan-file": PlanDocument.model_json_schema(),
        "calibration-file": _Document.model_json_schema(),
        "cluster-file": cluster_schema(),
        "verify": TypeAdapter(VerifyReport).json_schema(),
    }
    for verb, found in documents.items():
        schemas[verb] = reference.schema_of(found, f"parloom {verb} --json", SHALLOW.get(verb, 9))
    parts = {
        "commands": reference.commands(),
        "zoo models": reference.zoo_models(),
        "plan keys": reference.plan_keys(),
        "decisions": reference.decisions(DOCS / "decisions"),
        "rules": reference.rules(known_rules()),
        "rules of partly equal programs": reference.rules(partial_rules()),
    }
    parts |= {
        f"keys of {verb}": reference.json_keys(schemas[verb]) for verb in ("verify", *documents)
    }
    return parts, schemas


def test_pages_and_schemas_are_made_of_the_code(
    printed: dict[str, list[Any]], pytestconfig: pytest.Config
) -> None:
    parts, schemas = parts_of(printed)
    marked: set[str] = set()
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        marked |= {found[1] for found in reference.MARKED.finditer(page)}
        now = reference.written(page, parts)
        _same(path, page, now, pytestconfig)
        assert "| ? |" not in now, f"{path.name}: a key has no meaning; write it in the last column"
    assert marked == set(parts)
    for name, schema in schemas.items():
        path = SCHEMAS / f"{name}.json"
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        _same(path, old, json.dumps(schema, indent=1) + "\n", pytestconfig)
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(schemas)


def _same(path: Path, old: str, now: str, config: pytest.Config) -> None:
    if config.getoption("--update-docs"):
        path.write_text(now, encoding="utf-8")
    else:
        assert old == now, f"{path.name} changed; pytest tests/docs --update-docs"


def test_documents_fit_their_schemas_and_others_do_not(
    printed: dict[str, list[Any]], reader: Path
) -> None:
    for verb, found in printed.items():
        schema = json.loads((SCHEMAS / f"{verb}.json").read_text(encoding="utf-8"))
        for document in found:
            jsonschema.validate(document, schema)
    planted: tuple[tuple[str, dict[str, Any]], ...] = (
        ("plan", {"step_ms": 1.0}),
        ("plan", {"peak_bytes": "1 GiB"}),
        ("explain-name", {"terms": {}}),
        ("explain-parameter", {"stored": []}),
        ("explain-input", {"shape": "64 x 256"}),
        ("explain-module", {"readers": []}),
        ("explain-stages", {"stages": [{"stage": "0"}]}),
        ("explain-name-versus", {"versus": None}),
    )
    for verb, wrong in planted:
        schema = json.loads((SCHEMAS / f"{verb}.json").read_text(encoding="utf-8"))
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(printed[verb][0] | wrong, schema)


def test_scaling_of_a_plan_is_of_its_model_cluster_and_method(
    printed: dict[str, list[Any]],
) -> None:
    _, of_plan, weak = printed["scale"]
    assert of_plan["model"] == "zoo:mlp"
    assert [point["cluster"] for point in of_plan["points"]] == ["2xcpu", "2xcpu"]
    assert all(point["name"].startswith("fsdp") for point in of_plan["points"])
    samples = [point["samples_per_step"] for point in weak["points"]]
    assert samples == [64, 128]


def test_every_rule_can_be_looked_up() -> None:
    page = (DOCS / "reference" / "rules.md").read_text(encoding="utf-8")
    for name, own in {**known_rules(), **partial_rules()}.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert " = " in row
        assert all(str(given) in row for given in own.rule.inputs)
    told = page.split("<!-- made of the code: rules -->")[0]
    for word in ("classes", "pairs", "basis", "TASO's pruning", "rules_checked.py", "--out"):
        assert word in told


def test_a_changed_flag_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.commands()
    command: Callable[..., Any] = typer.main.get_command

    def another(app: Any) -> Any:
        found = command(app)
        found.commands["verify"].params[0].help = "Something else."
        return found

    monkeypatch.setattr(typer.main, "get_command", another)
    assert reference.commands() != before
