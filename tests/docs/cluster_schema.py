"""The JSON Schema of cluster files, for editors: what the strict reader takes, as far as a schema
can say it (`cost/cluster_file.py`; `test_cluster_schema.py` compares the two).
"""

import re
from dataclasses import fields
from typing import Any

from parloom.cost.devices import BACKEND_NAMES, DTYPES, PRICE_KEYS, known_devices
from parloom.cost.units import BINARY, DECIMAL, PER_SECOND
from parloom.ir.mesh import FABRICS, Efficiency
from tests.docs.reference import DRAFT

Schema = dict[str, Any]

NUMBER = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
POSITIVE = rf"(?=[0-9.]*[1-9]){NUMBER}"


def cluster_schema() -> Schema:
    """A cluster is of one kind of device, or of parts that differ."""
    return {
        "$schema": DRAFT,
        "title": "parloom cluster file",
        "description": "What `parloom plan --cluster FILE` reads.",
        **_plain_or_mixed({}),
        "$defs": {
            "part": _plain_or_mixed(
                {
                    "count": _whole("how many of this part there are"),
                    "uplink": _object(
                        {"bandwidth": _ref("bandwidth")}, _link(), "in the place of the join's"
                    ),
                }
            ),
            "level": _level(),
            "device": _device(),
            "host": _object(
                {
                    "memory": _quantity(_sizes(), "such as 1TiB", NUMBER),
                    "devices": _whole("how many devices share it"),
                    "bandwidth": _bandwidth("from each device"),
                },
                _link(),
                "the host of a node",
            ),
            "bandwidth": {
                "anyOf": [
                    _bandwidth("of one device, per direction"),
                    _object({"up": _bandwidth("sent"), "down": _bandwidth("received")}, {}, ""),
                ]
            },
        },
    }


def _plain_or_mixed(more: Schema) -> Schema:
    shared = {
        "name": _text("of the cluster"),
        "backend": {
            "enum": sorted(BACKEND_NAMES),
            "description": "other: priced, but no program is run on it",
        },
        **more,
    }
    join = {"name": _text("of the link"), "bandwidth": _ref("bandwidth")}
    mixed = _object(
        {
            "parts": _list(_ref("part"), "nodes that differ"),
            "join": _object(
                join, _link() | {"oversubscription": _factor()}, "the link between parts"
            ),
        },
        shared,
        "",
    )
    plain = _object(
        {
            "device": {"anyOf": [_known(), _ref("device")]},
            "levels": _list(_ref("level"), "links, from the devices outwards"),
        },
        shared | {"host": _ref("host")} | _price(),
        "",
    )
    priced = {"dependentRequired": {key: [PRICE_KEYS[0]] for key in PRICE_KEYS[1:]}}
    return {
        "type": "object",
        "if": {"required": ["parts"]},
        "then": mixed,
        "else": plain | priced,
    }


def _device() -> Schema:
    shares = {field.name: _share("of the rates in data sheets") for field in fields(Efficiency)}
    rates = {name: _rate() for name in (*DTYPES, *DTYPES.values())}
    return _object(
        {
            "name": _text("of the device"),
            "memory": _quantity(_sizes(), "such as 64GiB", POSITIVE),
            "memory_bandwidth": _bandwidth("of its memory"),
            "rates": _object({}, rates, "by dtype") | {"minProperties": 1},
        },
        {
            "cores": _whole("multiprocessors, or cores"),
            "efficiency": _object({}, shares, "shares of its rates that kernels reach"),
            "generation": _text("such as hopper"),
            **_price(),
        },
        "a device that is described in place",
    ) | {"dependentRequired": {key: [PRICE_KEYS[0]] for key in PRICE_KEYS[1:]}}


def _known() -> Schema:
    """A known device by any of its names, in any case."""
    names = [name for known in known_devices() for name in (known.device.name, *known.short)]
    letters = "|".join("".join(map(_any_case, name)) for name in names)
    spelled = {"enum": names, "description": "a known device: parloom cluster show --known"}
    return {"anyOf": [spelled, {"type": "string", "pattern": f"^({letters})$"}]}


def _any_case(letter: str) -> str:
    if letter.isalpha():
        return f"[{letter.upper()}{letter.lower()}]"
    return letter if letter in "- " else re.escape(letter)


def _level() -> Schema:
    needed = {"name": _text("a known interconnect brings its constants")}
    needed |= {"bandwidth": _ref("bandwidth")}
    optional = {
        **_link(),
        "oversubscription": _factor(),
        "reduces": _flag("whether the switch adds up what passes"),
        "size": _whole("how many of the level below it joins"),
        "fabric": {"enum": sorted(FABRICS), "default": "switch"},
        "torus": _list(_whole(""), "sizes, one level for each"),
        "wraps": _flag("whether a torus does"),
    }
    shapes = [
        {"required": ["size"], "not": {"anyOf": [{"required": [k]} for k in ("torus", "wraps")]}},
        {"required": ["torus"], "not": {"anyOf": [{"required": [k]} for k in ("size", "fabric")]}},
    ]
    return _object(needed, optional, "links that join what is below") | {"oneOf": shapes}


def _link() -> Schema:
    units = "|".join(PER_SECOND)
    return {
        "latency": _quantity(f"({units})", "such as 5us", NUMBER),
        "efficiency": _share("of the bandwidth that large messages reach"),
    }


def _price() -> Schema:
    first, *others = PRICE_KEYS
    price = _quantity("USD", "of one device, such as 2.10USD", NUMBER)
    return {first: price} | {key: _text("of the price") for key in others}


# --- values -------------------------------------------------------------------------------------


def _object(needed: Schema, optional: Schema, description: str) -> Schema:
    found: Schema = {"type": "object", "properties": needed | optional}
    if needed:
        found["required"] = list(needed)
    if description:
        found["description"] = description
    return found | {"additionalProperties": False}


def _list(items: Schema, description: str) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "description": description}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _text(description: str) -> Schema:
    """Plain values are texts to the reader; an editor sees numbers in some."""
    return {"type": ["string", "number", "boolean"], "description": description}


def _flag(description: str) -> Schema:
    return {"enum": [True, False], "description": description}


def _whole(description: str) -> Schema:
    found: Schema = {"type": "integer", "minimum": 1, "maximum": 10**9 - 1}
    return found | ({"description": description} if description else {})


def _share(description: str) -> Schema:
    numbers: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    text = {"type": "string", "pattern": f"^{POSITIVE}$"}
    return {"anyOf": [numbers, text], "description": description}


def _factor() -> Schema:
    numbers: Schema = {"type": "number", "minimum": 1, "maximum": 10**6}
    text = {"type": "string", "pattern": f"^{POSITIVE}$"}
    meaning = "4: when all devices below a child send, each has a quarter"
    return {"anyOf": [numbers, text], "description": meaning}


def _quantity(unit: str, description: str, number: str) -> Schema:
    pattern = rf"^\s*{number}\s*{unit}\s*$"
    return {"type": "string", "pattern": pattern, "description": description}


def _sizes() -> str:
    prefixes = "|".join(prefix for prefix in (*DECIMAL, *BINARY) if prefix)
    return f"({prefixes})?(B|bit)"


def _bandwidth(description: str) -> Schema:
    unit = rf"{_sizes()}/s(\s*(per direction|/direction))?"
    return _quantity(unit, f"{description}; such as 25Gbit/s", POSITIVE)


def _rate() -> Schema:
    prefixes = "|".join(prefix for prefix in DECIMAL if prefix)
    return _quantity(f"({prefixes})?FLOP/s", "such as 312TFLOP/s", POSITIVE)
