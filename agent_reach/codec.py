"""JSON to bytes and back: strict both ways, so that what one side sends the other can read."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_jsonable_python

__all__ = ["dumps", "loads"]


def dumps(value: Any) -> bytes:
    """Encode `value` as compact UTF-8 JSON; models, dates, UUIDs, sets and dataclasses are converted.

    Raises ValueError with the reason for NaN, infinity, circular or unknown objects: JSON has no NaN, and
    a silent null would be a wrong answer.
    """
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_convert)
        return text.encode()
    except (TypeError, PydanticSerializationError, RecursionError, UnicodeEncodeError) as error:
        raise ValueError(str(error)) from error


def loads(body: bytes) -> Any:
    """Decode JSON. Raises ValueError with the place for anything that isn't, NaN and deep nests included."""
    return from_json(body, allow_inf_nan=False)


def _convert(value: Any) -> Any:
    """Turn what `json` doesn't know into what it does; floats inside pass through its NaN check again."""
    return to_jsonable_python(value, inf_nan_mode="constants")
