"""From a run folder to a page that a person likes to read."""
