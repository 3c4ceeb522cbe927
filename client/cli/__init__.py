"""The `strataflux` command: one module a command, each with a `register` function."""
