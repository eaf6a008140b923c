"""What hypercorn serves of the REST port: TLS, HTTP/2, and all of it with --http-lean=false."""
