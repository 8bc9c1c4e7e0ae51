"""`holdfast adopt`: checkpoints of other libraries become the first checkpoint of a run.

`_state/restore_adopted.py` has how the script's first start takes it.
"""
