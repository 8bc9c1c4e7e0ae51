"""How keepers of several ranks reach each other."""
