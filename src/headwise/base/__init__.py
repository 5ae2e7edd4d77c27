"""What everything stands on: progress, files that survive a kill, processes, threads, options declared once."""
