"""The embedded training run: one small model in five precisions. Returns data."""
