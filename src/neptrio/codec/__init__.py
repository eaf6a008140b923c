"""Wire forms <-> requests and responses. No I/O, no scheduling."""
