"""`holdfast run --spare`: a process that has done the imports, and waits for its attempt."""
