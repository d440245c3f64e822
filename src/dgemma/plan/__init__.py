"""How many replicas a load needs: a simulation in virtual time. Imports no torch."""
