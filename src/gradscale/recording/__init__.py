"""Records a run: judge, run file, console and bundle. No framework."""
