"""What a field of the spec may hold, for a person: from the JSON schema, for the page and for the form."""

import json
import re
from collections.abc import Iterator
from typing import Any


def alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that may stand here: the part itself, or each kind of it."""
    return (
        [schema]
        if "properties" in schema
        else [one for one in schema.get("oneOf", ()) if "properties" in one]
    )


def default_of(name: str, schema: dict[str, Any], required: Any) -> str:
    """What stands there when nothing is said."""
    return "required" if name in required else f"`{json.dumps(schema.get('default', {}))}`"


def meaning(schema: dict[str, Any]) -> str:
    """Its help text, on one line."""
    return " ".join(schema.get("description", "").split())


def type_of(schema: dict[str, Any]) -> str:
    """Its type with its bounds."""
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_of(one) for one in schema["anyOf"])
    if "enum" in schema.get("items", {}):
        return f"array of {type_of(schema['items'])}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = " ".join(f"{sign} {schema[key]}" for key, sign in limits.items() if key in schema)
    return f"{schema.get('type', 'any')} {bounds}".strip()


def help_text(schema: dict[str, Any]) -> str:
    """Markdown for the form: what the field is for, and each of its parts.

    Without code spans: the form draws them higher than its lines.
    """
    lines = [meaning(schema), "", *_parts(schema)]
    return "\n".join(_CODE.sub(r"*\1*", line) for line in lines).strip()


_CODE = re.compile(r"`([^`]*)`")


def _parts(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    kinds = alternatives(schema)
    for kind in kinds:
        if len(kinds) > 1:
            yield from ("", meaning(kind), "")
        for name, inner in kind["properties"].items():
            if not alternatives(inner):
                kinds_of_value = type_of(inner).replace("` `", "` | `")
                said = default_of(name, inner, kind.get("required", ()))
                said = said if said == "required" else f"default {said}"
                yield f"- **{prefix}{name}** ({kinds_of_value}; {said}): {meaning(inner)}"
            yield from _parts(inner, f"{prefix}{name}.")
