"""Our own HTTP/1.1 connections, for plain TCP."""
