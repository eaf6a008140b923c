"""Backends that come with the server and use only what docs/backends.md gives everybody: a folder with a model.py each.

The server finds them by the entry points of pyproject.toml, as those of any other package, and imports none of them. What
they import is brought by the package's extras.
"""
