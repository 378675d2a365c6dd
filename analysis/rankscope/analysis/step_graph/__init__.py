"""The graph of a step: what every operation of every rank waited for, who was last, and what would come back."""
