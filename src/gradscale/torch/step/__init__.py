"""One optimizer step, from collected gradients to the outcome."""
