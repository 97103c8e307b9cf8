"""The algorithm: policies, states, verdicts, codes, the checkpoint format."""
