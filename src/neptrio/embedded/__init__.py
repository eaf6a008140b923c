"""The server inside other programs: `neptrio.Server`, its models as objects, functions as models.

The public names are in `neptrio` itself; docs/python-api.md shows them in use.
"""
