"""PyTorch's own tests of its scaler, run with gradscale's class in its place."""
