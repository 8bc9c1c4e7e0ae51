"""`holdfast plan`: how often to save, by closed forms and by a simulation with numpy."""
