"""`holdfast adopt`: checkpoints of other libraries become the first checkpoint of a run.

`_state/adopted.py` has how the script's first start takes it.
"""
