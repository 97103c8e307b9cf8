"""Records scripts and scalers that do not use gradscale."""
