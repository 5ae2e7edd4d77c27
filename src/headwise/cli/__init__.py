"""The ``headwise`` command, with one file for each subcommand in `commands`."""

from headwise.cli.main import main
