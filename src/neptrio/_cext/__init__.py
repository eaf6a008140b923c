"""The compiled modules; their sources are in cext/ at the top level."""
