"""A model's configuration: read, completed, validated, described."""
