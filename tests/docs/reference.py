"""Parts of the reference that are made of the code: between markers on its pages, and schemas.

A key's meaning is written by hand, in the last column of its row, and kept; a new key has none, and
`written` raises for it.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from parloom import cli, zoo
from parloom.ir import plan_schema
from parloom.rewrite.known import Known
from parloom.rewrite.rules import Rule
from parloom.rewrite.terms import calls_in

MARKED = re.compile(r"<!-- made of the code: (.+?) -->\n(.*?)<!-- end -->", re.S)
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Objects whose keys are names: of devices, streams, dtypes, packages, variables.
MAPS = frozenset(
    ("busy_s", "exposed_s", "flops_per_s", "packages", "environment", "peaks", "sources", "splits")
)
TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (type(None), "null"),
)

Schema = dict[str, Any]


def written(page: str, parts: Mapping[str, str]) -> str:
    """The page with its marked parts as they are now; a part that it names and is none raises."""

    def part(found: re.Match[str]) -> str:
        now = parts[found[1]]
        if now.startswith("| key |"):
            now = _with_meanings(now, found[2])
        return f"<!-- made of the code: {found[1]} -->\n{now}<!-- end -->"

    return MARKED.sub(part, page)


def _with_meanings(table: str, old: str) -> str:
    meanings = {}
    for row in old.splitlines():
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        if len(cells) > 2:
            meanings[cells[0]] = cells[-1]
    head, rule, *rows = table.splitlines()
    lines = [head, rule]
    for row in rows:
        key = row.strip("| ").split(" | ")[0]
        lines.append(row.replace(" | ? |", f" | {meanings.get(key, '?')} |"))
    return "\n".join(lines) + "\n"


# --- commands -----------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and flags, as `--help` has them."""
    return "\n".join(_commands("parloom", typer.main.get_command(cli.app)))


def _commands(name: str, command: Any) -> list[str]:
    if hasattr(command, "commands"):
        parts = (_commands(f"{name} {sub}", own) for sub, own in command.commands.items())
        return [line for part in parts for line in part]
    usage = " ".join(
        _metavar(parameter) if parameter.required else f"[{_metavar(parameter)}]"
        for parameter in command.params
        if parameter.param_type_name == "argument"
    )
    lines = [
        f"## {name}",
        "",
        command.help.strip(),
        "",
        "```text",
        f"{name} [OPTIONS] {usage}".rstrip(),
    ]
    lines += ["```", "", "| | | default |", "|---|---|---|"]
    for parameter in command.params:
        flags = ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
        values = "" if getattr(parameter, "is_flag", False) else _metavar(parameter)
        value = "".join(f" `{one}`" for one in values.split("|") if one)
        shown = (
            f"`{_metavar(parameter)}`" if parameter.param_type_name == "argument" else flags + value
        )
        lines.append(f"| {_cell(shown)} | {_cell(parameter.help or '')} | {_default(parameter)} |")
    return [*lines, ""]


def _metavar(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    if parameter.metavar:
        return str(parameter.metavar)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(one.value for one in kind)
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    return "" if value in (None, False, []) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- models -------------------------------------------------------------------------------------


def zoo_models() -> str:
    """Each model of the zoo with the sizes that it has by default."""
    lines = ["| model | is | sizes |", "|---|---|---|"]
    for name in (*zoo.names(), *zoo.denoisers()):
        module = import_module(zoo._builder(name).__module__)
        is_ = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        sizes = ", ".join(f"{key} {value}" for key, value in zoo.sizes(name).items())
        lines.append(f"| `zoo:{name}` | {_cell(is_.rstrip('.'))} | {_cell(sizes)} |")
    return "\n".join(lines) + "\n"


# --- decisions ----------------------------------------------------------------------------------


def decisions(folder: Path) -> str:
    """A link to each decision, by its title."""
    lines = []
    for path in sorted(folder.glob("0*.md")):
        number, _, title = path.read_text(encoding="utf-8").splitlines()[0][2:].partition(": ")
        lines.append(f"- {number}: [{title}]({path.name})")
    return "\n".join(lines) + "\n"


# --- rules --------------------------------------------------------------------------------------


def rules(known: Mapping[str, Known]) -> str:
    """A table of rules for each operator that ids begin with."""
    by_op: dict[str, list[Rule]] = {}
    for found in known.values():
        by_op.setdefault(_first_op(found.rule), []).append(found.rule)
    lines: list[str] = []
    for op in sorted(by_op):
        lines += [f"### {op}", "", "| rule | says | of |", "|---|---|---|"]
        for own in sorted(by_op[op], key=lambda rule: rule.id):
            sides = (", ".join(map(str, side)) for side in (own.left, own.right))
            inputs = ", ".join(map(str, own.inputs))
            lines.append(f"| `{own.id}` | `{_cell(' = '.join(sides))}` | `{_cell(inputs)}` |")
        lines.append("")
    return "\n".join(lines)


def _first_op(own: Rule) -> str:
    ops = (call.op for side in (*own.left, *own.right) for call in calls_in(side))
    return next(op for op in ops if own.id.startswith(f"{op}_"))


# --- plan files ---------------------------------------------------------------------------------


def plan_keys() -> str:
    """A table for each object of a plan file."""
    schema = plan_schema.PlanDocument.model_json_schema()
    documents = {"PlanDocument": schema, **schema["$defs"]}
    lines: list[str] = []
    for name, own in documents.items():
        if "properties" not in own:
            continue
        kind: type[BaseModel] = getattr(plan_schema, name)
        about = " ".join((kind.__doc__ or "").split())
        lines += [f"### {_words(name)}", "", about, "", "| key | type | default |", "|---|---|---|"]
        for key, value in own["properties"].items():
            default = (
                "needed" if key in own.get("required", ()) else f"`{_plain(value.get('default'))}`"
            )
            lines.append(f"| `{key}` | {_cell(_type(value, schema['$defs']))} | {default} |")
        lines.append("")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return (
        {None: "null"}.get(value, str(value)) if not isinstance(value, list | dict) else str(value)
    )


def _words(name: str) -> str:
    """`StageDocument` as `Stage`."""
    return name.removesuffix("Document")


def _type(schema: Schema, defined: Mapping[str, Schema]) -> str:
    """A type in a few words, with its limits."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _words(name) if "properties" in defined[name] else _type(defined[name], defined)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_type(one, defined) for one in schema[several]))
    if "enum" in schema:
        return " or ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}), defined)}"
    if kind == "object":
        inside = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        return f"map of names to {_type(inside[0] or {}, defined)}"
    least = schema.get("minimum")
    return f"{kind} from {least} on" if least in (0, 1) else str(kind)


# --- documents of --json ------------------------------------------------------------------------


def schema_of(documents: Sequence[Any], title: str, depth: int = 9) -> Schema:
    """The JSON Schema of documents of one kind: all keys, of all types that were seen."""
    return {"$schema": DRAFT, "title": title} | _merged(documents, depth)


def _merged(values: Sequence[Any], depth: int, named: str = "") -> Schema:
    simple = [name for kind, name in TYPES if any(_is(value, kind) for value in values)]
    if "number" in simple and "integer" in simple:
        simple.remove("integer")
    found: Schema = {}
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    if objects:
        simple.append("object")
        found |= _object(objects, depth, named)
    if lists:
        simple.append("array")
        items = [item for value in lists for item in value]
        found |= {"items": _merged(items, depth - 1)} if items and depth else {}
    if simple in ([], ["null"]):  # of what is no more known, anything is legal
        return {}
    return {"type": simple[0] if len(simple) == 1 else simple} | found


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _object(objects: Sequence[Mapping[str, Any]], depth: int, named: str) -> Schema:
    keys = list(dict.fromkeys(key for value in objects for key in value))
    if named in MAPS:
        inside = [own for value in objects for own in value.values()]
        return {"additionalProperties": _merged(inside, depth - 1)}
    if not depth:
        return {}
    own = {key: [value[key] for value in objects if key in value] for key in keys}
    return {
        "properties": {key: _merged(values, depth - 1, key) for key, values in own.items()},
        "required": [key for key in keys if len(own[key]) == len(objects)],
        "additionalProperties": False,
    }


def json_keys(schema: Schema) -> str:
    """A table of the keys of a document, to be given meanings."""
    lines = ["| key | type | meaning |", "|---|---|---|"]
    items = schema["items"] if schema.get("type") == "array" else schema
    for key, value in items["properties"].items():
        optional = "" if key in items["required"] else ", or missing"
        inside = value.get("items", value).get("properties", {})
        nested = f" of `{'`, `'.join(inside)}`" if inside else ""
        lines.append(f"| `{key}` | {_cell(_json_type(value))}{nested}{optional} | ? |")
    return "\n".join(lines) + "\n"


def _json_type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_json_type, schema["anyOf"]))
    if "$ref" in schema:
        return "object"
    kinds = schema.get("type", "null")
    kinds = [kinds] if isinstance(kinds, str) else sorted(kinds, key="null".__eq__)
    return " or ".join("list" if kind == "array" else kind for kind in kinds)
