"""One decision for all ranks."""
