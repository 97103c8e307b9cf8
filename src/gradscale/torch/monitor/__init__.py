"""Judges and reports the step rows that arrive from the device."""
