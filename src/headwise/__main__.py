"""``python -m headwise``, as ``torchrun -m headwise`` starts it."""

from headwise.cli import main

main()
