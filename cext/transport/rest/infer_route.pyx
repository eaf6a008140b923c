"""The model and version that a path of the infer route names, remembered: clients ask for few paths, again and again.

Rules:
 1. What a path says follows from its text alone, so all connections of all servers share what is remembered.
 2. At most MOST_ROUTES paths are remembered, none longer than limits.LONGEST_KEPT; then it begins anew.
"""
from neptrio.limits import remember
from neptrio.transport.rest import routes

cdef enum:
    MOST_ROUTES = 1024     # clients send few, and others must not make memory grow

cdef dict _routes = {}     # path -> (model, version)


cdef tuple route_of(bytes path):
    """The (model, version) of an infer path, or None."""
    found = _routes.get(path, False)
    if found is False:
        match = routes.match("POST", path.decode("latin-1"))
        found = None
        if match is not None and match.verb == "infer" and match.allowed:
            found = (match.model, match.version)
        remember(_routes, path, found, MOST_ROUTES)
    return found
