"""The console: pages for a browser that show a running server and send requests to it (docs/console.md)."""
