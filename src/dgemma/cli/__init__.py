"""The command line: one file per command, each thin. Nothing here imports torch at start."""
