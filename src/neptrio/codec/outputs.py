"""What the client asked to be done with the outputs; see cext/outputs.pyx."""

from neptrio._cext.outputs import select

__all__ = ["select"]
