"""`python -m funcrt` is `funcrt`."""

from funcrt.cli import main

main()
