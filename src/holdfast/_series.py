"""What `run.log` was given, on its way to the keeper."""
