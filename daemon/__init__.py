"""The service: stores, caches, the reader, sessions and the control plane; it never imports torch."""
