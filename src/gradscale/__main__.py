"""`python -m gradscale`."""

from gradscale.cli import main

main()
