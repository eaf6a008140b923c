"""Beside the real server, where it is installed."""
