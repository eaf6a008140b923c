"""What is made of trace files: summaries, a page, other formats, and the requests once more."""
