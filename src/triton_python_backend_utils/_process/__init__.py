"""Isolated models: the code of a model's own process, and the socket between it and the server.

Nothing here imports the server, because the process may run another Python (3.8 or newer) that has only numpy.
"""
