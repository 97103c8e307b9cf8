"""The names of `torch.cuda` that a script with the older spelling imports."""
