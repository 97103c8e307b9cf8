"""The judge of a run: its history in, findings with causes and advice out. Pure."""
