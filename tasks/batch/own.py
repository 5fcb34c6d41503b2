"""What a row may say for itself: its sampling and its JSON schema, checked before a device is taken."""

import json
from typing import Any

from pydantic import ValidationError

from tasks.batch.prompts import BadRow
from tasks.spec import Sampling


def sampling_of(value: Any) -> dict[str, Any]:
    """The fields of `sampling` that the row sets itself.

    Raises:
        BadRow: it is not an object, or a field is unknown or out of range.
    """
    document = _object(value, "BadSampling", "the row's own sampling")
    if not document:
        return {}
    try:
        checked = Sampling.model_validate(document, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRow("BadSampling", f"the row's own sampling: {field}: {first['msg']}") from None
    return {name: getattr(checked, name) for name in document}


def schema_of(value: Any) -> dict[str, Any] | None:
    """The row's own JSON schema; None when it has none.

    Raises:
        BadRow: it is not a JSON schema.
    """
    document = _object(value, "BadSchema", "the row's own schema")
    if not document:
        return None
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(document.get("$schema", ""), str):
        raise BadRow("BadSchema", "the row's own schema is no JSON schema: its $schema is not a text")
    try:
        validator_for(document).check_schema(document)
    except SchemaError as error:
        raise BadRow("BadSchema", f"the row's own schema is no JSON schema: {error.message[:200]}") from None
    except RecursionError:
        raise BadRow("BadSchema", "the row's own schema is nested too deeply") from None
    return document


def _object(value: Any, error_class: str, what: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise BadRow(error_class, f"{what} is a text, but not JSON") from None
        except RecursionError:
            raise BadRow(error_class, f"{what} is nested too deeply") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(error_class, f"{what} is not an object")
    # A column of structs has every field in every row.
    return {name: inner for name, inner in value.items() if inner is not None}
