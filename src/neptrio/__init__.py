"""neptrio: an inference server on trio that speaks the Triton protocol."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing takes longer to import than everything that comes before process_start
if TYPE_CHECKING:
    from typing import Any

    from neptrio.embedded.blocking import BlockingModel, BlockingSequence, RunningServer
    from neptrio.embedded.model import Model, Sequence
    from neptrio.embedded.options import InferOptions, RequestOptions
    from neptrio.embedded.response import Response
    from neptrio.embedded.server import Server
    from neptrio.embedded.server_settings import ServerSettings
    from neptrio.embedded.signature import Context, TensorSpec
    from neptrio.errors import Code, InvalidArgument, NotFound, TritonError, Unavailable

__version__ = "0.1.0"

# public name -> where it is; imported when it is first used, so that the command starts fast
_PUBLIC = {
    "BlockingModel": "embedded.blocking",
    "BlockingSequence": "embedded.blocking",
    "Code": "errors",
    "Context": "embedded.signature",
    "InferOptions": "embedded.options",
    "InvalidArgument": "errors",
    "Model": "embedded.model",
    "NotFound": "errors",
    "RequestOptions": "embedded.options",
    "Response": "embedded.response",
    "RunningServer": "embedded.blocking",
    "Sequence": "embedded.model",
    "Server": "embedded.server",
    "ServerSettings": "embedded.server_settings",
    "TensorSpec": "embedded.signature",
    "TritonError": "errors",
    "Unavailable": "errors",
}
__all__ = [
    "BlockingModel",
    "BlockingSequence",
    "Code",
    "Context",
    "InferOptions",
    "InvalidArgument",
    "Model",
    "NotFound",
    "RequestOptions",
    "Response",
    "RunningServer",
    "Sequence",
    "Server",
    "ServerSettings",
    "TensorSpec",
    "TritonError",
    "Unavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'neptrio' has no attribute '{name}'")
    return getattr(import_module(f"neptrio.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
