"""Prepares examples/model_repository: files that are not kept in git are made or fetched here."""
