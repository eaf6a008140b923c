"""Isolated models: the wire between the server and a model's own process, and that process.

Nothing here imports the server: the process may run another Python (3.9 or newer) whose only
package is numpy.
"""
