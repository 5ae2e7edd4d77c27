"""The subcommands of ``headwise``, one thin file each; importing a file registers its command."""
