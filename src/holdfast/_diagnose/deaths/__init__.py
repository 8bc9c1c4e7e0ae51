"""From evidence to the cause of a death."""
