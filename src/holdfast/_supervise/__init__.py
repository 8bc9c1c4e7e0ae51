"""Above the trainer: the process that starts it, passes signals on and outlives it."""
