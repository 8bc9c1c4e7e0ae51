"""Where a state lives: its format, shared memory, the run folder, commits, reading, and mirrors."""
