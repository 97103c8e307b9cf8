"""The state that survives a step on the device, its update, its copy to the host."""
