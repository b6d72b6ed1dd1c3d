"""The JSON schema of a configuration file, for editors. Relations between two values of a file (an axis and its mesh, a
name and its signal) cannot be expressed in a schema: the parser checks them."""

from __future__ import annotations

from typing import TypeAlias

from gt.core.meta import MAX_DIMS
from gt.signals.checks import (
    ALL,
    AXIS_NAME,
    EAGER_MEMORY,
    INPUTS,
    MAX_AXES,
    MAX_NAME,
    MAX_WORKERS,
    MODEL,
    NOT_CUT,
    OUTPUTS,
    RESERVED,
    REST,
)

Json: TypeAlias = "None | bool | int | str | list[Json] | dict[str, Json]"

_AXIS: dict[str, Json] = {"type": "string", "pattern": f"^{AXIS_NAME}$"}
_NAME: dict[str, Json] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
_SIGNAL: dict[str, Json] = {**_NAME, "not": {"const": MODEL}}

_DIM: Json = {
    "description": f"mesh axes that cut it, major to minor; {NOT_CUT} or null: not cut; {REST}: any number of dims",
    "anyOf": [
        _AXIS,
        {"enum": [NOT_CUT, REST, None]},
        {"type": "array", "items": _AXIS, "uniqueItems": True, "maxItems": MAX_AXES},
    ],
}

_DIMS: Json = {
    "description": "for each tensor dim the mesh axes that cut it",
    "type": "array",
    "items": {"$ref": "#/$defs/dim"},
    "maxItems": MAX_DIMS,
    "contains": {"const": REST},
    "minContains": 0,
    "maxContains": 1,
}

_MESH: Json = {
    "description": "mesh axes and their sizes, major to minor",
    "type": "object",
    "propertyNames": {"pattern": f"^{AXIS_NAME}$"},
    "additionalProperties": {"type": "integer", "minimum": 1},
    "minProperties": 1,
    "maxProperties": MAX_AXES,
}

_WORKERS: Json = {
    "description": f"ids of workers, from 0; {ALL}: all connected ones; by default as many as the mesh has",
    "anyOf": [
        {"const": ALL},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "uniqueItems": True,
            "minItems": 1,
            "maxItems": MAX_WORKERS,
        },
    ],
}

_REPLICATE: Json = {"description": "the whole tensor on every worker", "type": "boolean"}

_SHARD: Json = {
    "description": "how tensors are laid out: one of axis, dims with a mesh, and replicate",
    "type": "object",
    "properties": {
        "axis": {
            "description": "tensor dim to cut over the workers; negative from the end",
            "type": "integer",
            "minimum": -MAX_DIMS,
            "maximum": MAX_DIMS - 1,
        },
        "workers": {"$ref": "#/$defs/workers"},
        "mesh": {"$ref": "#/$defs/mesh"},
        "dims": {"$ref": "#/$defs/dims"},
        "replicate": _REPLICATE,
    },
    "additionalProperties": False,
    "oneOf": [
        {"required": ["axis"], "properties": {"dims": False, "mesh": False, "replicate": {"const": False}}},
        {"required": ["dims", "mesh"], "properties": {"axis": False, "replicate": {"const": False}}},
        {
            "required": ["replicate"],
            "properties": {"axis": False, "dims": False, "mesh": False, "replicate": {"const": True}},
        },
    ],
}

_SIGNAL_SECTION: Json = {
    "description": "where and how the ops of a scope run",
    "type": "object",
    "properties": {
        "shard": {"$ref": "#/$defs/shard"},
        "replicate": _REPLICATE,
        "backward": {"description": "the signal that gradients run under", **_SIGNAL},
        "compile": {"description": "a compilation boundary: its ops are compiled on the workers", "type": "boolean"},
        "reshard_after_forward": {
            "description": "drop the gathered copies of a module's parameters when its forward has ended",
            "type": "boolean",
        },
    },
    "additionalProperties": False,
    "not": {"required": ["shard", "replicate"]},
}

_MODEL_SECTION: Json = {
    "description": "how a model is laid out, by patterns of names; the last pattern that matches a name counts",
    "type": "object",
    "properties": {
        "mesh": {"$ref": "#/$defs/mesh"},
        "workers": {"$ref": "#/$defs/workers"},
        INPUTS: {"description": "the layout of the tensors that the model is called with", "$ref": "#/$defs/dims"},
        EAGER_MEMORY: {
            "description": "the bytes of a worker within which an eager step is planned",
            "type": "integer",
            "minimum": 1,
        },
        OUTPUTS: {
            "description": "the layouts of the results of modules, by patterns of names",
            "type": "object",
            "propertyNames": {**_NAME, "not": {"enum": [*RESERVED]}},
            "additionalProperties": {"$ref": "#/$defs/dims"},
        },
    },
    "patternProperties": {
        f"^(?!({'|'.join(RESERVED)})$)": {
            "description": "a list: the layout of parameters and buffers; text: the signal that modules run in",
            "anyOf": [{"$ref": "#/$defs/dims"}, _SIGNAL],
        }
    },
    "propertyNames": _NAME,
}

SCHEMA: dict[str, Json] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "GT configuration",
    "description": "signals by their names, and the section `model`",
    "type": "object",
    "properties": {MODEL: {"$ref": "#/$defs/model"}},
    "additionalProperties": {"$ref": "#/$defs/signal"},
    "propertyNames": _NAME,
    "$defs": {
        "signal": _SIGNAL_SECTION,
        "model": _MODEL_SECTION,
        "shard": _SHARD,
        "workers": _WORKERS,
        "mesh": _MESH,
        "dims": _DIMS,
        "dim": _DIM,
    },
}
