"""Other programs' Python interfaces, served by this server: see the packages inside."""
