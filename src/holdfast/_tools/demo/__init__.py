"""The demo: a training that dies and comes back.

`story` runs the lives of two trainings, `train_torch` and `train_numpy` are what it
runs, in processes of their own: only a real process can be killed.
"""
