"""Training loops around the scaler: retries, closures, accumulation windows."""
