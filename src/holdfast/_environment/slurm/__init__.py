"""What holdfast knows of SLURM: the job it is in, its options, its end."""
