"""Terminal screens and figures. Formatting only: `diagnosis` decides."""
