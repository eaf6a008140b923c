"""The Python backend: models written as a TritonPythonModel class.

backend         one model version: where its file is, how it is run, auto-completion
source          loads model files so that models do not see each other's modules
instance        a model in the server's process, on its instance's thread or event loop
isolated        a model in a process of its own
process_session one process of such a model and its rings
template        the process that those processes are forked from
convert         converts requests and responses between the server's types and the model's
bls             inference on other models, from any thread
"""

from neptrio.backends.python.backend import PythonBackend

__all__ = ["PythonBackend"]
