"""The demo: one small model trained in five precisions. Returns data."""
