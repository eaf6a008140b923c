"""Other people's clients against a live server; `make test-clients` runs them in an environment of their own."""
