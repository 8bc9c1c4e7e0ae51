"""From a checkpoint or a slot back to verified bytes."""
