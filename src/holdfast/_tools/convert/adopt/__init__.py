"""`holdfast adopt`: checkpoints that others wrote become the first checkpoint of a run.

`formats` tells them apart and reads them, `named` finds what each part is called in the run,
`adoption` makes the run. How the script's first start takes it is in `_state/adopted.py`.
"""
