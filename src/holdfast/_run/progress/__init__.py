"""The progress line: where the run stands and what is safe. It must never break or slow a run."""
