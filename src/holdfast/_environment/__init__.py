"""What surrounds a run: variables, SLURM, clouds, processes."""
