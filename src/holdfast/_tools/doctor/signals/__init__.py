"""Whether a signal reaches the training: a dry run of the real launchers."""
