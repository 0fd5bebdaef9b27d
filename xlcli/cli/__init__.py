"""The command line: one thin file per command, which renders the events of a workflow."""
