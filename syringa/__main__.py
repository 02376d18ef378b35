"""`python -m syringa` is the `syringa` command."""

from syringa.cli import main

main()
