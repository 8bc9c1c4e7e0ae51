"""What is seen of a run from outside: memory, processes, disks, GPU."""
