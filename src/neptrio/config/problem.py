"""A problem that a check of models found: where, what, and whether it keeps the model from loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ERROR = "error"  # the server would refuse the model
WARNING = "warning"  # the server would load the model, but probably not as its author meant


@dataclass(frozen=True)
class Problem:
    """One problem; printed as FILE:LINE: FIELD: MESSAGE. `line` is 0 and `field` "" where they are not known."""

    message: str
    file: str = ""
    line: int = 0
    field: str = ""
    severity: str = ERROR

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        field = f"{self.field}: " if self.field else ""
        return f"{place}{field}{self.message}"

    def as_dict(self) -> dict[str, Any]:
        """As a JSON object, without the keys that are not known."""
        return {key: value for key, value in asdict(self).items() if value}


Report = Callable[[Problem], None]
