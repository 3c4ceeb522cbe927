"""Pure decisions of the cache: replacement, budgets, misses and prefetch; no I/O and no clock."""
