"""Converts what is on the wire into requests, and responses into what is on the wire. No I/O, no scheduling."""
