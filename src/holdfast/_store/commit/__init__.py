"""From an image in memory to a durable checkpoint."""
