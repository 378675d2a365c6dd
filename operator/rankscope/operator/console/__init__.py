"""The console: what the correlation says, over time, for browsers and programs. Nothing here decides anything."""
