"""neptrio: an inference server on trio that speaks the Triton protocol."""

__version__ = "0.1.0"
