"""Measures how many gradient elements underflow in float16."""
