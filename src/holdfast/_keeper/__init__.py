"""The other process: it makes slots durable and outlives the trainer's death."""
