"""What can be made of trace files: summaries, an HTML page, other formats, and a replay of the requests."""
