"""`holdfast export`: a checkpoint of a run in the formats that other programs read."""
