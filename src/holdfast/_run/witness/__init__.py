"""`holdfast prove`, inside the training process: sends what the script trains to the prover."""
