"""Worker processes on this machine: their environment, output and end."""
