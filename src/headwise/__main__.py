"""The entry point of ``python -m headwise`` and ``torchrun -m headwise``."""

from headwise.cli import main

main()
