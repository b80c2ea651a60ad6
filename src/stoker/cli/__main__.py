"""`python -m stoker.cli`: the command where it is not on PATH."""

from stoker.cli import main

main()
