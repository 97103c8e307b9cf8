"""Master weights, precision levels and casts."""
