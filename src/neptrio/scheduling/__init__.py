"""Schedulers: who runs next, and with whom. Pure decisions; time is an argument."""
