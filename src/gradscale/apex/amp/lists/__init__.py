"""Apex's lists of functions: cast to half, to f32, to the widest input, or refused."""
