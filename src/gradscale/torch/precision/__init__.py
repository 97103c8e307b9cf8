"""Mixed precision beside the scaler: weights, levels, losses, closures, retries."""
