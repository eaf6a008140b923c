"""The REST verbs: routes, inference, generate and the ASGI app with all others."""
