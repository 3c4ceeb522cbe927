"""Every contract between processes: wire messages, shared-memory layouts, rings and the store format."""
