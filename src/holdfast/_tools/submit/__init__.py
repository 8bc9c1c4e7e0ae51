"""`holdfast submit`: the batch script that it writes."""
