"""REST from the socket on by hypercorn as it is released, with --http-lean=false."""
