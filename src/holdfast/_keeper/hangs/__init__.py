"""The keeper's watch over the progress of its trainer."""
