"""What is known of an end: from records, processes and SLURM."""
