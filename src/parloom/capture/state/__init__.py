"""All state that a call of a model can reach, as objects of Python: no graph is known here."""
