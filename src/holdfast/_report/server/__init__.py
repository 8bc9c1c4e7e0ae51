"""The local page over all runs below a folder."""
