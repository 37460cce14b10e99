"""How each small model is made: programs, run in the engine environment by ``launch/models.py``."""
