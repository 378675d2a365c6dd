"""Windows: when they begin and end, what goes into them, who receives them."""
