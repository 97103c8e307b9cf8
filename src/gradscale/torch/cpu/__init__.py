"""The names of `torch.cpu` that a script with the older spelling imports."""
