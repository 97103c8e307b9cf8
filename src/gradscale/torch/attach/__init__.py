"""Attaches gradscale to scripts and scalers that were written without it."""
