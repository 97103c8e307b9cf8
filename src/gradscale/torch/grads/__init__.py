"""Collects, reads, unscales and clips gradients."""
