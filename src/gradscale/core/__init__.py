"""The scaling rule, its records and checkpoints, and float16 histograms."""
