"""Stack sampling with py-spy: recordings, dumps, phases, budget."""
