"""The fixtures of the kit, as a program's tests get them."""

from neptrio.testing.plugin import neptrio_clock, neptrio_serve

__all__ = ["neptrio_clock", "neptrio_serve"]
