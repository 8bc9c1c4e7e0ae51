"""`holdfast demo`: a training that is killed and resumes.

`story` runs the attempts of `train_torch` or `train_numpy` in processes of their own: only a real
process can be killed.
"""
