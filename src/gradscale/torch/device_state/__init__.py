"""The device state that persists between steps, its update and its copy to the host."""
