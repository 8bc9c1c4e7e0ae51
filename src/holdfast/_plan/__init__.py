"""How often to save: the model, its closed forms and its simulation."""
