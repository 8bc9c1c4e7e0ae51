"""How often to save: the model, its closed forms and its simulation.

`closed` and `rate` are all that a training imports, and they are arithmetic. The rest is for
`holdfast plan`, and needs numpy.
"""
