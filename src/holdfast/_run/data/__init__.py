"""Where in its data a run is, and how it gets back there."""
