"""Schemas from code: JSON Schema from dataclasses, a JSON form of Arrow schemas."""

from __future__ import annotations

import re
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal

import pyarrow as pa

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def arrow_fields(schema: pa.Schema) -> list[Schema]:
    """The columns of an Arrow schema: name, type, nullable, and the children of nested types."""
    return [{"name": field.name} | _arrow_field(field) for field in schema]


def _arrow_field(field: pa.Field) -> Schema:
    """Without the name: Parquet renames the items of lists."""
    kind = field.type
    result: Schema = {"nullable": field.nullable}
    if pa.types.is_dictionary(kind):
        return result | {"type": "dictionary", "index": str(kind.index_type), "value": str(kind.value_type)}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        name = "large_list" if pa.types.is_large_list(kind) else "list"
        return result | {"type": name, "item": _arrow_field(kind.value_field)}
    if pa.types.is_struct(kind):
        return result | {"type": "struct", "fields": [{"name": f.name} | _arrow_field(f) for f in kind]}
    return result | {"type": str(kind)}


def object_schema(properties: Schema, *, required: bool = True, extra: Schema | bool = False) -> Schema:
    """The schema of an object.

    Args:
        properties: name to schema.
        required: whether all of them must be there.
        extra: whether other keys are allowed, or their schema.
    """
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": extra}
    if required and properties:
        schema["required"] = sorted(properties)
    return schema


def dataclass_properties(cls: Any, *, required: bool = True) -> Schema:
    """Field name to schema, described by the ``Attributes`` section of the docstring.

    Args:
        cls: a dataclass with fields of plain types, other dataclasses, and tuples, lists, dicts, unions and
            literals of them.
        required: whether all fields of dataclasses inside must be present.
    """
    kinds = typing.get_type_hints(cls)
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        texts |= attribute_texts(base) if is_dataclass(base) else {}
    return {
        f.name: ({"description": texts[f.name]} if f.name in texts else {})
        | type_schema(kinds[f.name], required=required)
        for f in fields(cls)
    }


def type_schema(kind: Any, *, required: bool = True) -> Schema:
    """The schema of a type annotation.

    Raises:
        TypeError: a type that has no JSON form.
    """
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if is_dataclass(kind):
        return object_schema(dataclass_properties(kind, required=required), required=required)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(a, required=required) for a in arguments]}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": type_schema(arguments[1], required=required)}
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": type_schema(arguments[0], required=required)}
    if origin is tuple:
        items = [type_schema(a, required=required) for a in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    raise TypeError(f"no JSON schema for {kind}")


def attribute_texts(cls: Any) -> dict[str, str]:
    """Field name to text, from lines ``name, other: text`` of the docstring's Attributes section.

    A line may hold several entries, separated by semicolons.
    """
    document = re.split(r"\n\s*Attributes:\n", cls.__doc__ or "")
    if len(document) < 2:
        return {}
    section = re.split(r"\n\s*\n|\n\s*Raises:", document[1])[0]
    names = {f.name for f in fields(cls)}
    indent = min(len(line) - len(line.lstrip()) for line in section.splitlines() if line.strip())
    entries: list[str] = []
    for line in section.splitlines():
        if len(line) - len(line.lstrip()) == indent:
            entries.append(line.strip())
        elif line.strip() and entries:
            entries[-1] += " " + line.strip()
    texts: dict[str, str] = {}
    for part in (p.strip() for entry in entries for p in entry.split("; ")):
        head, separator, text = part.partition(": ")
        mentioned = [n.strip() for n in head.split(",")]
        if separator and set(mentioned) <= names:
            texts |= dict.fromkeys(mentioned, text.replace("``", "").strip())
    return texts
