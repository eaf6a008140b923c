"""ModelCore, re-exported: the part of a model that the request path touches."""

from __future__ import annotations

from neptrio._cext.request import InputSpec, ModelCore

__all__ = ["InputSpec", "ModelCore"]
