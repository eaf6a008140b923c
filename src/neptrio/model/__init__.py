"""Models: configuration, a loaded version, its instances."""
