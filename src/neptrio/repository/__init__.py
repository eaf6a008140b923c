"""The model repository: folders, versions, loading and unloading."""
