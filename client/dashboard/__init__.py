"""A page about one daemon, served on this machine: hit rates, tokens a second, misses by layer, the cache."""
