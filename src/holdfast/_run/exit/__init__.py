"""How a run leaves, and with which exit status."""
