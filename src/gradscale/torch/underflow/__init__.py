"""Measures what float16 loses of the gradients."""
