"""A problem that a check of models found: where, what, and whether it keeps the model from loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ERROR = "error"  # the server would refuse the model
WARNING = "warning"  # it would load, but probably not as was meant


@dataclass(frozen=True)
class Problem:
    """`line` is 0 and `field` "" where there is none. Printed it is FILE:LINE: FIELD: MESSAGE."""

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
        """As JSON shows it; what there is not is left out."""
        return {key: value for key, value in asdict(self).items() if value}


Report = Callable[[Problem], None]
