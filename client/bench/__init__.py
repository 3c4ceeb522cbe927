"""Benchmarks behind ``strataflux bench``: each returns plain numbers and leaves nothing behind."""
