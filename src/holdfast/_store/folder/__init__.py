"""What outlives a process: the run folder's paths, files and journal."""
