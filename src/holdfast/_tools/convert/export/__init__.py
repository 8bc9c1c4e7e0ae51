"""`holdfast export`: a checkpoint of a run in the formats that others read.

`export` chooses, checks and writes; a file for each format.
"""
