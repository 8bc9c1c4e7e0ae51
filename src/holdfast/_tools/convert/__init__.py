"""`holdfast export` and `holdfast adopt`: checkpoints for other programs, and from other libraries.

`_state/restore_adopted.py` has how the first start of a script takes an adopted checkpoint.
"""
