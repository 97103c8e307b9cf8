"""Terminal tables, figures and pages: formats and draws, decides nothing."""
