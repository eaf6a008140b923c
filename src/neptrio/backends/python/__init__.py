"""The Python backend: models written as a TritonPythonModel class.

backend     one model version: where its file is, how it is run, auto-completion
source      loading model files in isolation from each other
instance    the model in this process, on its instance's thread or event loop
convert     requests and responses between the server's types and the model's
bls         inference on other models, from any thread
"""

from neptrio.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
