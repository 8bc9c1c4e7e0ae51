"""Why and how a run is asked to stop."""
