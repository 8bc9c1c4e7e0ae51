"""Inside the training process: loops, boundary, signals, saving, data, ranks and exit."""
