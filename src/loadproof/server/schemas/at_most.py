"""How many entries a list or an object of a request may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class AtMost:
    """Bounds the list or object it annotates, as each of a request must be: faults take time and memory.

    What has more than ``limit`` entries is refused for that, and a list's first wrong entry is its last one
    that is looked at.
    """

    limit: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema with its bounds."""
        schema = handler(source)
        if schema["type"] == "list":
            return {**schema, "max_length": self.limit, "fail_fast": True}
        assert schema["type"] == "dict"
        # A schema of objects counts its entries after it has looked at all of them.
        return core_schema.no_info_before_validator_function(
            self._counted, {**schema, "max_length": self.limit}
        )

    def _counted(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.limit:
            raise PydanticCustomError("too_long", "too long", {"max_length": self.limit})
        return value
