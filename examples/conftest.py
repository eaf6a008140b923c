"""Fixtures of the test kit, for the tests among the examples."""

pytest_plugins = ["neptrio.testing.plugin"]
