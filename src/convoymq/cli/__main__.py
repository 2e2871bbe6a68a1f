"""`python -m convoymq.cli` is `convoy`."""

from convoymq.cli import main

main()
