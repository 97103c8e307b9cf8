"""Mixed precision beside the scaler: master weights, levels, casts, losses."""
