"""One file for each thing that is measured; each has `measure(plan)`, which returns tables."""
